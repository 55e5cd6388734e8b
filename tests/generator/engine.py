"""The simulation: hosts that issue work, streams that run it in order, collectives that tie ranks together.

Each rank's training loop is a generator that drives a ``Host`` and yields a ``Work`` whenever the process blocks until
that work has ended. Streams run their queue in order; a collective occupies a rank's stream from its start there until
``last arrival + cost``, on all ranks alike. Example, two ranks, compute 10 and 14, then a collective of cost 5::

    rank 0   compute [0, 10)   collective [10, 19)   of which 4 waiting
    rank 1   compute [0, 14)   collective [14, 19)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Program = Generator["Work", None, None]


@dataclass(eq=False)
class Collective:
    """One collective over ``ranks``; ``cost_ns`` is its transfer time after the last arrival."""

    kind: str
    ranks: tuple[int, ...]
    sequence: int
    step: int
    elements_in: int
    elements_out: int
    bytes: int
    cost_ns: int
    works: dict[int, Work] = field(default_factory=dict)

    @property
    def last_arrival_ns(self) -> int:
        """When the last rank came; only once every rank has."""
        return max(work.started for work in self.works.values())

    def arrive(self, jitter: Callable[[], int]) -> None:
        """Fix the end on every rank if all have arrived."""
        if len(self.works) == len(self.ranks) and all(w.start_ns is not None for w in self.works.values()):
            end = self.last_arrival_ns + self.cost_ns
            for rank in sorted(self.works):
                self.works[rank].end_ns = end + jitter()


@dataclass(eq=False)
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
    stream: int = 0
    lane: int = 0
    correlation: int = 0
    external_id: int = 0
    args: dict[str, Any] = field(default_factory=dict)
    start_ns: int | None = None
    end_ns: int | None = None

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

    def advance(self, jitter: Callable[[], int]) -> bool:
        """Start whatever can be started; True if anything was."""
        begun = self._next
        while self._next < len(self.works):
            work = self.works[self._next]
            busy = [] if None in self._last else [last for last in self._last if last is not None]
            if any(other.end_ns is None for other in (*work.after, *busy)):
                break
            free = [last.ended for last in busy]
            work.lane = free.index(min(free)) if free else self._last.index(None)
            work.start_ns = max(
                [
                    work.queued_ns + work.latency_ns,
                    *(other.ended for other in work.after),
                    *([min(free)] if free else []),
                ]
            )
            self._last[work.lane] = work
            self._next += 1
            if work.collective is None:
                work.end_ns = work.start_ns + work.duration_ns
            else:
                work.collective.arrive(jitter)
        return self._next > begun


@dataclass
class HostEvent:
    """A host-side event. ``kind`` is the trace's category."""

    kind: str
    name: str
    thread: str
    start_ns: int
    end_ns: int
    step: int
    external_id: int
    correlation: int = 0
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HostState:
    """What the training process did in ``[start_ns, end_ns)``: dataloader, sync, operator, host; or
    ``call``, an operator that hands a collective over, and ``wrapper``, autograd's own time around an operator."""

    start_ns: int
    end_ns: int
    state: str
    thread: str


class Host:
    """One rank's training process: a clock, a stack of ranges, and a record of both."""

    def __init__(self, rank: int, start_ns: int, noise: float = 0.0, seed: int = 0) -> None:
        self.rank = rank
        self.now = start_ns
        self.thread = "main"
        self.step = -1
        self.events: list[HostEvent] = []
        self.states: list[HostState] = []
        self.streams: dict[int, Stream] = {}
        self._noise = noise
        self._random = random.Random(seed * 1_000_003 + rank)
        self._state = ["host"]
        self._ids = 0
        self._correlation = 0
        self._open: list[int] = [0]

    def noisy(self, ns: float) -> int:
        """A duration with this job's noise; never below half of it."""
        if not self._noise:
            return round(ns)
        return round(ns * max(0.5, 1.0 + self._noise * self._random.gauss(0.0, 1.0)))

    def spend(self, ns: int) -> None:
        """Let the process be busy with whatever it is at."""
        if ns < 0:
            raise ValueError(f"rank {self.rank} cannot spend {ns} ns")
        if ns:
            self.states.append(HostState(self.now, self.now + ns, self._state[-1], self.thread))
            self.now += ns

    def spend_until(self, ns: int) -> None:
        """Let time pass to ``ns``, if that lies ahead."""
        self.spend(max(0, ns - self.now))

    @contextmanager
    def range(
        self, kind: str, name: str, state: str | None = None, args: dict[str, Any] | None = None
    ) -> Iterator[HostEvent]:
        """A range of the trace's category ``kind``; ``state`` is what the process does inside it."""
        self._ids += 1
        event = HostEvent(kind, name, self.thread, self.now, self.now, self.step, self._ids, args=args or {})
        self.events.append(event)
        self._open.append(self._ids)
        self._state.append(state or self._state[-1])
        try:
            yield event
        finally:
            self._state.pop()
            self._open.pop()
            event.end_ns = self.now

    @property
    def external_id(self) -> int:
        """Id of the innermost open range."""
        return self._open[-1]

    def correlate(self) -> int:
        """A fresh correlation id."""
        self._correlation += 1
        return self._correlation

    def stream(self, number: int, lanes: int = 1) -> Stream:
        """The stream of this number, made on first use."""
        return self.streams.setdefault(number, Stream(number, lanes))


class Fabric:
    """The network between ranks: hands every rank its part of the same collective."""

    def __init__(self, ranks: int, end_jitter_ns: int = 0, seed: int = 0) -> None:
        self.ranks = tuple(range(ranks))
        self.collectives: list[Collective] = []
        self._joined = dict.fromkeys(self.ranks, 0)
        self._jitter_ns = end_jitter_ns
        self._random = random.Random(seed)

    def join(self, rank: int, work: Work, make: Callable[[int], Collective]) -> None:
        """Tie ``work`` to the rank's next collective; ``make(sequence)`` describes it."""
        sequence = self._joined[rank]
        self._joined[rank] += 1
        described = make(sequence)
        if sequence == len(self.collectives):
            self.collectives.append(described)
        shared = self.collectives[sequence]
        if (shared.kind, shared.bytes) != (described.kind, described.bytes):
            raise ValueError(f"collective {sequence}: rank {rank} wants {described.kind}, others {shared.kind}")
        shared.works[rank] = work
        work.collective = shared

    def jitter(self) -> int:
        """How much later than the first this rank leaves a collective."""
        return self._random.randint(0, self._jitter_ns) if self._jitter_ns else 0


def run(hosts: list[Host], programs: list[Program], fabric: Fabric) -> None:
    """Drive all ranks to the end. Raises RuntimeError when they wait for each other."""
    blocked: dict[int, Work] = {}
    running = dict(enumerate(programs))
    while running:
        moved = False
        for index in list(running):
            while index not in blocked or blocked[index].end_ns is not None:
                moved = True
                try:
                    blocked[index] = next(running[index])
                except StopIteration:
                    del running[index]
                    break
        moved |= _advance(hosts, fabric)
        if not moved:
            raise RuntimeError(f"deadlock: {[(rank, work.name) for rank, work in blocked.items() if rank in running]}")
    while _advance(hosts, fabric):
        pass
    for host in hosts:
        for stream in host.streams.values():
            if any(work.end_ns is None for work in stream.works):
                raise RuntimeError(f"rank {host.rank}: work on stream {stream.number} never ends")


def _advance(hosts: list[Host], fabric: Fabric) -> bool:
    """One round over all streams; True if any work was started."""
    # A list, not a generator: every stream gets its turn.
    return any(stream.advance(fabric.jitter) for host in hosts for stream in host.streams.values())
