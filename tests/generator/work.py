"""Streams, which run their work in order, and the collectives that connect ranks.

Streams run their queue in order; a collective occupies a rank's stream from its start there until
``last arrival + cost``, on all ranks alike. Example, two ranks, compute 10 and 14, then a collective of cost 5::

    rank 0   compute [0, 10)   collective [10, 19)   of which 4 waiting
    rank 1   compute [0, 14)   collective [14, 19)

A send and its receive are a collective of two ranks. A work may carry several (sends and receives that were batched):
it ends when the last of them has.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.generator.layout import Group

Program = Generator["Work", None, None]


@dataclass(eq=False, slots=True)
class Collective:
    """One collective over ``ranks``; ``cost_ns`` is its transfer time after the last arrival."""

    kind: str
    ranks: tuple[int, ...]
    """Ascending; of a send (kind ``send_recv``) the sender, then the receiver."""
    sequence: int
    step: int
    elements_in: int
    elements_out: int
    bytes: int
    cost_ns: int
    works: dict[int, Work] = field(default_factory=dict)
    group: Group | None = None
    end_ns: int | None = None
    _arrived: int = 0
    _last_ns: int | None = None

    @property
    def last_arrival_ns(self) -> int:
        """When the last rank arrived; only once every rank has."""
        if self._last_ns is None:
            self._last_ns = max(work.started for work in self.works.values())
        return self._last_ns

    def arrive(self, fabric: Fabric) -> None:
        """One more rank has arrived; the last one fixes the end."""
        self._arrived += 1
        if self._arrived == len(self.ranks):
            self.end_ns = self.last_arrival_ns + self.cost_ns
            for rank in sorted(self.works):
                work = self.works[rank]
                ends = [collective.end_ns for collective in work.collectives]
                if None not in ends:
                    work.finish(max(end for end in ends if end is not None) + fabric.jitter(), fabric)

    def waits(self, time: int) -> bool:
        """Whether it transfers nothing at this time: a rank has not arrived, or it has ended."""
        return time < self.last_arrival_ns or (self.end_ns is not None and time >= self.end_ns)


@dataclass(eq=False, slots=True)
class Work:
    """Something that a stream (or a backend's thread) runs."""

    rank: int
    kind: str
    """``compute``, ``comm``, ``copy`` or ``memset``."""
    name: str
    step: int
    """Host step in which it was issued."""
    queued_ns: int
    """It is in the queue."""
    duration_ns: int = 0
    """Of anything but a collective."""
    latency_ns: int = 0
    """From being queued to the earliest start."""
    after: tuple[Work, ...] = ()
    """Events it waits on."""
    collective: Collective | None = None
    """What it takes part in; the first where there are several."""
    stream: int = 0
    lane: int = 0
    correlation: int = 0
    external_id: int = 0
    args: dict[str, Any] = field(default_factory=dict)
    start_ns: int | None = None
    end_ns: int | None = None
    others: tuple[Collective, ...] = ()
    """Further sends and receives in the same kernel."""
    part: Part | None = None
    _waiters: list[Stream | int] | None = None

    @property
    def started(self) -> int:
        """Start, once known."""
        assert self.start_ns is not None, f"{self.name} has not started"
        return self.start_ns

    @property
    def ended(self) -> int:
        """End, once known."""
        assert self.end_ns is not None, f"{self.name} has not ended"
        return self.end_ns

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All that it takes part in."""
        return () if self.collective is None else (self.collective, *self.others)

    def waits(self, time: int) -> bool:
        """Whether none of its collectives transfers at this time."""
        return all(collective.waits(time) for collective in self.collectives)

    def finish(self, end_ns: int, fabric: Fabric) -> None:
        """It ends then; whoever waits for that may go on."""
        self.end_ns = end_ns
        if self._waiters:
            fabric.ready.extend(self._waiters)
            self._waiters = None

    def wake(self, waiter: Stream | int) -> None:
        """Have ``waiter`` (a stream, or the program of this number) continue once the end is known."""
        if self._waiters is None:
            self._waiters = []
        if waiter not in self._waiters:
            self._waiters.append(waiter)


class Part(NamedTuple):
    """The part of a step that a work belongs to: forward or backward of a micro-batch."""

    forward: bool
    microbatch: int
    chunk: int = 0


class Stream:
    """A queue that ``lanes`` executors serve in order: 1 for a device's stream, 2 for gloo's threads."""

    def __init__(self, number: int, lanes: int = 1) -> None:
        self.number = number
        self.works: list[Work] = []
        self._next = 0
        self._last: list[Work | None] = [None] * lanes

    def put(self, work: Work) -> None:
        """Append to the queue."""
        work.stream = self.number
        self.works.append(work)

    @property
    def last(self) -> Work | None:
        """The newest work in the queue."""
        return self.works[-1] if self.works else None

    def advance(self, fabric: Fabric) -> None:
        """Start whatever can be started; what the next one waits for wakes this stream."""
        while self._next < len(self.works):
            work = self.works[self._next]
            busy = [] if None in self._last else [last for last in self._last if last is not None]
            start = work.queued_ns + work.latency_ns
            for other in (*work.after, *busy):
                if other.end_ns is None:
                    other.wake(self)
                    return
            for other in work.after:
                start = max(start, other.ended)
            if busy:
                free = [last.ended for last in busy]
                work.lane = free.index(min(free))
                start = max(start, min(free))
            else:
                work.lane = self._last.index(None)
            work.start_ns = start
            self._last[work.lane] = work
            self._next += 1
            if work.collective is None:
                work.finish(start + work.duration_ns, fabric)
            else:
                for collective in work.collectives:
                    collective.arrive(fabric)


class Fabric:
    """The network between ranks: connects the rank ops of each collective."""

    def __init__(self, ranks: int, end_jitter_ns: int = 0, seed: int = 0) -> None:
        self.ranks = tuple(range(ranks))
        self.collectives: list[Collective] = []
        self.ready: deque[Stream | int] = deque()
        """Streams and programs whose awaited work has ended."""
        self._joined: dict[tuple[Hashable, int], int] = {}
        self._channels: dict[Hashable, list[Collective]] = {}
        self._jitter_ns = end_jitter_ns
        self._random = random.Random(seed)

    def join(self, rank: int, work: Work, make: Callable[[int], Collective], channel: Hashable = None) -> Collective:
        """Connect ``work`` to the rank's next collective on a channel (a group, or a direction between two ranks);
        ``make(sequence)`` describes it."""
        sequence = self._joined.get((channel, rank), 0)
        self._joined[channel, rank] = sequence + 1
        shared = self._channels.setdefault(channel, [])
        described = make(sequence)
        if sequence == len(shared):
            shared.append(described)
            self.collectives.append(described)
        collective = shared[sequence]
        if (collective.kind, collective.bytes) != (described.kind, described.bytes):
            raise ValueError(f"collective {sequence}: rank {rank} wants {described.kind}, others {collective.kind}")
        collective.works[rank] = work
        if work.collective is None:
            work.collective = collective
        else:
            work.others = (*work.others, collective)
        return collective

    def jitter(self) -> int:
        """How much later than the first this rank leaves a collective."""
        return self._random.randint(0, self._jitter_ns) if self._jitter_ns else 0
