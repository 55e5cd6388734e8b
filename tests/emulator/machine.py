"""The machine: devices with streams, collectives, and programs that run until they have to wait.

A program is a Python generator: it runs on its own clock and yields a :class:`Work` when it cannot go on before that
has ended (or, ``Started(work)``, begun). Work that a stream was given begins when everything before it has ended;
whatever is known follows at once, whatever depends on another rank follows when that rank gets there. So nothing is
planned in advance: when things happen is what comes of running the programs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Sequence
from typing import Any

Waits = Generator["Work | Started", None, None]
"""A program, or a part of one: what it yields it waits for."""


class Work:
    """One piece of work on a stream of one rank's device. ``start_ns``, ``end_ns`` are None until they are known."""

    __slots__ = (
        "args", "blockers", "correlation", "duration_ns", "earliest_ns", "end_ns", "external_id", "followers", "kind",
        "meetings", "name", "queued_ns", "rank", "start_ns", "step", "stream",
    )  # fmt: skip

    def __init__(self, rank: int, stream: int, kind: str, name: str, duration_ns: int, queued_ns: int) -> None:
        self.rank, self.stream, self.kind, self.name = rank, stream, kind, name
        self.duration_ns = duration_ns
        self.queued_ns = queued_ns
        self.earliest_ns = queued_ns
        self.start_ns: int | None = None
        self.end_ns: int | None = None
        self.blockers = 0
        self.followers: list[tuple[Work, int]] = []
        self.meetings: Sequence[Meeting] = ()
        self.correlation = self.external_id = 0
        self.step = 0
        self.args: dict[str, Any] = {}


class Started:
    """To wait until work has begun, not ended."""

    __slots__ = ("work",)

    def __init__(self, work: Work) -> None:
        self.work = work


class Meeting:
    """A collective, or a message: nobody's part ends before everybody's has begun, and then the transfer takes time."""

    def __init__(self, members: int, transfer_ns: int) -> None:
        self.transfer_ns = transfer_ns
        self._missing = members
        self.works: list[Work] = []
        self.begun_ns = 0
        self.done_ns: int | None = None

    def arrive(self, work: Work) -> bool:
        """A rank's part has begun; whether it was the last."""
        self.works.append(work)
        self._missing -= 1
        self.begun_ns = max(self.begun_ns, work.start_ns or 0)
        if self._missing:
            return False
        self.done_ns = self.begun_ns + self.transfer_ns
        return True


class Machine:
    """All streams of all ranks, and the programs."""

    def __init__(self, gap_ns: int) -> None:
        self._gap_ns = gap_ns
        self._last: dict[tuple[int, int], Work] = {}
        self._ended: defaultdict[Work, list[Waits]] = defaultdict(list)
        self._begun: defaultdict[Work, list[Waits]] = defaultdict(list)
        self._ready: deque[Waits] = deque()
        self._agenda: list[Work] = []

    def submit(self, work: Work, after: Iterable[Work] = ()) -> None:
        """Queue work on its stream: it begins when what was queued there before, and ``after``, have ended."""
        key = work.rank, work.stream
        before = self._last.get(key)
        self._last[key] = work
        if before is not None:
            self._follow(work, before, self._gap_ns)
        for other in after:
            if other.rank == work.rank and other is not before:
                self._follow(work, other, self._gap_ns)
        if not work.blockers:
            self._agenda.append(work)
            self._settle()

    def last(self, rank: int, stream: int) -> Work | None:
        """What was queued last on a stream: an event that is recorded now happens when it ends."""
        return self._last.get((rank, stream))

    @staticmethod
    def _follow(work: Work, other: Work, gap_ns: int) -> None:
        if other.end_ns is None:
            work.blockers += 1
            other.followers.append((work, gap_ns))
        else:
            work.earliest_ns = max(work.earliest_ns, other.end_ns + gap_ns)

    def _settle(self) -> None:
        while self._agenda:
            work = self._agenda.pop()
            work.start_ns = work.earliest_ns
            if self._begun:
                self._ready.extend(self._begun.pop(work, ()))
            if not work.meetings:
                self._end(work, work.start_ns + work.duration_ns)
                continue
            for meeting in work.meetings:
                if meeting.arrive(work):
                    for member in meeting.works:
                        self._end_if_done(member)

    def _end_if_done(self, work: Work) -> None:
        done = [meeting.done_ns for meeting in work.meetings]
        ends = [ns for ns in done if ns is not None]
        if len(ends) == len(done):
            # Each rank's kernel returns a little later than the data is there: ``duration_ns`` of a meeting's work.
            self._end(work, max(ends) + work.duration_ns)

    def _end(self, work: Work, end_ns: int) -> None:
        work.end_ns = end_ns
        if self._ended:
            self._ready.extend(self._ended.pop(work, ()))
        for follower, gap_ns in work.followers:
            follower.earliest_ns = max(follower.earliest_ns, end_ns + gap_ns)
            follower.blockers -= 1
            if not follower.blockers:
                self._agenda.append(follower)
        work.followers = []

    def run(self, programs: Iterable[Waits]) -> None:
        """Run all programs to their ends. Raises RuntimeError where they wait for each other forever."""
        self._ready.extend(programs)
        left = len(self._ready)
        while self._ready:
            program = self._ready.popleft()
            for wanted in program:
                if isinstance(wanted, Started):
                    if wanted.work.start_ns is None:
                        self._begun[wanted.work].append(program)
                        break
                elif wanted.end_ns is None:
                    self._ended[wanted].append(program)
                    break
            else:
                left -= 1
        if left:
            stuck = [work.name for work in (*self._ended, *self._begun)]
            raise RuntimeError(f"{left} programs wait forever, for {sorted(set(stuck))}")
