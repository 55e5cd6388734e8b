"""Runs the ranks' programs by NCCL's rules until nothing moves.

A host issues without waiting, but for :class:`Sync`. A collective starts on a rank when it has been issued, what was
issued before it in its group has ended, and so has everything before it that it needs. It ends when all ranks of its
group have started the one of its number, unless they do not fit. A message starts and ends likewise, between two ranks;
of messages issued as one, all end together. Times are ns.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field

from tests.stuck.program import Collective, Group, Job, Join, Message, Messages, Stall, Stop, Sync


@dataclass(eq=False)
class Issued:
    """A collective, or messages issued as one, on one rank."""

    rank: int
    action: Collective | Messages
    sequence: int
    """Of collectives in the group; of messages (issued as one) in the group on this rank; from 1."""
    collectives: int
    """Collectives that the rank has issued in the group by then."""
    created_ns: int
    needs: list[Issued]
    started_ns: int | None = None
    ended_ns: int | None = None
    then: list[Issued | int] = field(default_factory=list)
    """What waits for its end: others, or the host of a rank."""
    met: list[int] = field(default_factory=list)
    """Of messages: when both sides of each had started."""

    @property
    def group(self) -> Group:
        """The process group."""
        return self.action.group


class Rank:
    """One rank's host and what it has issued."""

    def __init__(self, rank: int, seed: int, pace: float) -> None:
        self.rng = random.Random(f"{seed}/{rank}")
        self.pace = pace
        self.place = 0
        """Of the next action in its program."""
        self.clock_ns = 0
        self.stopped = False
        self.stalled = False
        self.issued: list[Issued] = []
        self.synced = 0
        """Number of those of ``issued`` that the host knows to have ended."""
        self.needed: list[Issued] = []
        """What the next action needs."""
        self.last: dict[object, Issued] = {}
        """By stream: a group's, or that of two ranks whose messages are not batched."""
        self.counts: dict[tuple[str, bool], int] = defaultdict(int)


class Machine:
    """A job at work. ``pace``: rank -> how many times the others' time its host takes."""

    def __init__(self, job: Job, seed: int = 0, pace: dict[int, float] | None = None) -> None:
        self.job = job
        self.ranks = [Rank(rank, seed, (pace or {}).get(rank, 1.0)) for rank in range(job.world)]
        self._gathered: dict[tuple[str, int], list[Issued]] = defaultdict(list)
        self._half: dict[tuple[str, int, int, bool], deque[Issued]] = defaultdict(deque)
        self._todo: deque[Issued | int] = deque(range(job.world))

    def run(self) -> Machine:
        """Until nothing moves."""
        while self._todo:
            what = self._todo.popleft()
            if isinstance(what, Issued):
                self._try_to_start(what)
            else:
                self._host(what)
        return self

    @property
    def finished(self) -> bool:
        """Has every rank come to the end of its program?"""
        return all(rank.place == len(program) for rank, program in zip(self.ranks, self.job.programs, strict=True))

    def _host(self, number: int) -> None:
        rank, program = self.ranks[number], self.job.programs[number]
        while rank.place < len(program):
            action = program[rank.place]
            if isinstance(action, Stop):
                rank.stopped = True
                return
            if isinstance(action, Sync):
                while rank.synced < len(rank.issued):
                    ended_ns = rank.issued[rank.synced].ended_ns
                    if ended_ns is None:
                        rank.issued[rank.synced].then.append(number)
                        return
                    rank.clock_ns = max(rank.clock_ns, ended_ns)
                    rank.synced += 1
                rank.clock_ns += int(rank.rng.uniform(1_000_000, 3_000_000) * rank.pace)
            elif isinstance(action, Stall):
                rank.stalled = True
            elif isinstance(action, Join):
                rank.needed += [last] if (last := rank.last.get(action.group.name)) is not None else []
            else:
                self._issue(number, rank, action)
            rank.place += 1

    def _issue(self, number: int, rank: Rank, action: Collective | Messages) -> None:
        rank.clock_ns += int(rank.rng.uniform(30_000, 300_000) * rank.pace)
        messages = isinstance(action, Messages)
        stream: object = action.group.name
        if isinstance(action, Messages) and not action.batched:
            stream = (stream, *sorted((number, action.parts[0].peer)))
        rank.counts[action.group.name, messages] += 1
        before = rank.last.get(stream)
        issued = Issued(
            number,
            action,
            rank.counts[action.group.name, messages],
            rank.counts[action.group.name, False],
            rank.clock_ns,
            [*rank.needed, *([before] if before is not None else [])],
        )
        rank.last[stream] = issued
        rank.issued.append(issued)
        if messages or (isinstance(action, Collective) and action.blocking):
            rank.needed = [issued]
        if not rank.stalled:
            self._todo.append(issued)

    def _try_to_start(self, issued: Issued) -> None:
        start_ns = issued.created_ns
        for need in issued.needs:
            if need.ended_ns is None:
                need.then.append(issued)
                return
            start_ns = max(start_ns, need.ended_ns)
        issued.started_ns = start_ns
        issued.needs = []
        if isinstance(issued.action, Collective):
            self._gather(issued)
        else:
            for part in issued.action.parts:
                self._meet(issued, part)

    def _gather(self, issued: Issued) -> None:
        there = self._gathered[issued.group.name, issued.sequence]
        there.append(issued)
        fit = len({each.action.signature for each in there if isinstance(each.action, Collective)}) == 1
        if len(there) == len(issued.group.ranks) and fit:
            end_ns = max(each.started_ns or 0 for each in there) + 50_000
            for each in there:
                self._end(each, end_ns)

    def _meet(self, issued: Issued, part: Message) -> None:
        sender, receiver = (issued.rank, part.peer) if part.send else (part.peer, issued.rank)
        other = self._half[issued.group.name, sender, receiver, not part.send]
        if not other:
            self._half[issued.group.name, sender, receiver, part.send].append(issued)
            return
        peer = other.popleft()
        met_ns = max(issued.started_ns or 0, peer.started_ns or 0)
        for each in (issued, peer):
            each.met.append(met_ns)
            if isinstance(each.action, Messages) and len(each.met) == len(each.action.parts):
                self._end(each, max(each.met) + 20_000)

    def _end(self, issued: Issued, end_ns: int) -> None:
        issued.ended_ns = end_ns
        self._todo.extend(issued.then)
        issued.then = []
