"""Training processes, and the loop that drives all of them and their streams (``tests.generator.work``) to the end.

Each rank's training loop is a generator that drives a ``Host`` and yields a ``Work`` whenever the process blocks until
that work has ended.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

from tests.generator.work import Fabric, Part, Program, Stream, Work


@dataclass(eq=False, slots=True)
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


class HostState(NamedTuple):
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
        self.part: Part | None = None
        """The micro-batch it is at, in forward or backward."""
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
            end = self.now + ns
            self.states.append(HostState(self.now, end, self._state[-1], self.thread))
            self.now = end

    def spend_until(self, ns: int) -> None:
        """Let time pass to ``ns``, if that lies ahead."""
        self.spend(max(0, ns - self.now))

    def range(self, kind: str, name: str, state: str | None = None, args: dict[str, Any] | None = None) -> Range:
        """A range of the trace's category ``kind``; ``state`` is what the process does inside it."""
        return Range(self, kind, name, state, args, 0)

    def costly(self, kind: str, name: str, state: str, args: dict[str, Any], ns: int) -> Range:
        """A range that itself costs ``ns``: half before what is done in it, half after."""
        return Range(self, kind, name, state, args, ns)

    def open(self, event: HostEvent, state: str | None) -> None:
        """A range begins."""
        self._ids += 1
        event.external_id = self._ids
        self.events.append(event)
        self._open.append(self._ids)
        self._state.append(state or self._state[-1])

    def close(self, event: HostEvent) -> None:
        """The innermost range ends."""
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
        made = self.streams.get(number)
        if made is None:
            made = self.streams[number] = Stream(number, lanes)
        return made


class Range:
    """A range while it is open. A class, not a ``contextmanager``: there are hundreds of thousands of them."""

    __slots__ = ("_args", "_event", "_host", "_kind", "_name", "_ns", "_state")

    def __init__(
        self, host: Host, kind: str, name: str, state: str | None, args: dict[str, Any] | None, ns: int
    ) -> None:
        self._host, self._kind, self._name, self._state, self._args, self._ns = host, kind, name, state, args, ns

    def __enter__(self) -> HostEvent:
        host = self._host
        args = {} if self._args is None else self._args
        event = HostEvent(self._kind, self._name, host.thread, host.now, host.now, host.step, 0, 0, args)
        self._event = event
        host.open(event, self._state)
        host.spend(self._ns // 2)
        return event

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._host.spend(self._ns - self._ns // 2)
        self._host.close(self._event)


def run(hosts: Sequence[Host], programs: Sequence[Program], fabric: Fabric) -> None:
    """Drive all ranks to the end. Raises RuntimeError when they wait for each other.

    Each program runs until it blocks, its streams until they do; whatever ends wakes who waited for it.
    """
    blocked: dict[int, Work] = {}
    for index in range(len(programs)):
        _go_on(index, hosts[index], programs[index], blocked, fabric)
    while fabric.ready:
        woken = fabric.ready.popleft()
        if isinstance(woken, Stream):
            woken.advance(fabric)
        else:
            _go_on(woken, hosts[woken], programs[woken], blocked, fabric)
    if blocked:
        raise RuntimeError(f"deadlock: {[(rank, work.name) for rank, work in blocked.items()]}")
    for host in hosts:
        for stream in host.streams.values():
            if any(work.end_ns is None for work in stream.works):
                raise RuntimeError(f"rank {host.rank}: work on stream {stream.number} never ends")


def _go_on(index: int, host: Host, program: Program, blocked: dict[int, Work], fabric: Fabric) -> None:
    """Run one program until it blocks or ends."""
    blocked.pop(index, None)
    for work in program:
        for stream in host.streams.values():
            stream.advance(fabric)
        if work.end_ns is None:
            blocked[index] = work
            work.wake(index)
            return
    for stream in host.streams.values():
        stream.advance(fabric)
