"""The true time breakdown of a rank: goes through its windows from one change of anything to the next."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tests.generator.engine import Host
from tests.generator.spec import JobSpec
from tests.generator.work import Work

CATEGORIES = (
    "compute",
    "exposed_comm_wait",
    "exposed_comm_transfer",
    "exposed_copy",
    "idle_dataloader",
    "idle_sync",
    "idle_launch",
    "idle_host",
    "idle_dependency",
)
_IDLE = {
    "dataloader": "idle_dataloader",
    "sync": "idle_sync",
    "operator": "idle_launch",
    "call": "idle_launch",
    "wrapper": "idle_launch",
    "host": "idle_host",
}


@dataclass(frozen=True)
class Window:
    """One step of one rank: where it lies on the true clock and where its time went (ns)."""

    rank: int
    step: int
    start_ns: int
    end_ns: int
    categories: dict[str, int]
    comm_ns: int
    """Time in which a collective ran; overlapped communication is what the exposed categories leave of it."""
    idle_after_sync_ns: int
    """Whole idle intervals that began while the process was in a synchronising call, without the loader's time:
    the most that ``idle_sync`` can be; ``categories`` has the least."""
    doubtful_compute_ns: int
    """On CPUs, the part of compute that is only the framework's: handing a collective over, or autograd's own time
    around an operator. Whether that is an operator at work is a matter of definition."""
    mixed_comm_ns: int
    """Exposed time in which one collective waited and another transferred; ``categories`` counts it as transfer."""
    bubbles: tuple[tuple[int, int], ...] = ()
    """[start, end) of every interval in which the rank waited for another stage, in order: exposed waiting in sends,
    receives and collectives across stages. Part of ``exposed_comm_wait``."""

    @property
    def duration_ns(self) -> int:
        """Length of the step."""
        return self.end_ns - self.start_ns


def bounds(spec: JobSpec, host: Host) -> list[tuple[int, int]]:
    """(start, end) of a rank's windows. Host windows are ``ProfilerStep#k``. The device is at step k once the host has
    begun it and the device has ended all that was issued before, copies included; with its first kernel at the latest.
    It is done with the last one when the host and it have ended it. Where it has nothing to do as the recording begins,
    it counts as far behind the host then as it is at the end of that step."""
    names = {f"ProfilerStep#{step}" for step in spec.recorded_steps}
    marks = [(event.start_ns, event.end_ns) for event in host.events if event.name in names]
    if spec.backend == "gloo":
        return marks
    first: dict[int, Work] = {}
    ended: dict[int, int] = defaultdict(int)
    for stream in host.streams.values():
        for work in stream.works:
            ended[work.step] = max(ended[work.step], work.ended)
            if work.kind in ("compute", "comm"):
                known = first.setdefault(work.step, work)
                if work.queued_ns < known.queued_ns:
                    first[work.step] = work
    starts = []
    for step, (begin, _) in zip(spec.recorded_steps, marks, strict=True):
        done = max((end for earlier, end in ended.items() if earlier < step), default=0)
        starts.append(min(first[step].started, max(begin, done)))
    stops = [*starts[1:], max(marks[-1][1], *ended.values())]
    if starts[0] == marks[0][0]:
        starts[0] = min(first[spec.recorded_steps[0]].started, starts[0] + stops[0] - marks[0][1])
    return list(zip(starts, stops, strict=True))


def windows(spec: JobSpec, host: Host) -> tuple[Window, ...]:
    """All windows of a rank."""
    sweep = _Sweep(spec, host)
    return tuple(
        sweep.window(step, start, end)
        for step, (start, end) in zip(spec.recorded_steps, bounds(spec, host), strict=True)
    )


class _Sweep:
    """Goes through a rank's windows in order."""

    def __init__(self, spec: JobSpec, host: Host) -> None:
        self._rank = host.rank
        self._on_device = spec.backend == "nccl"
        self._roles = ("pipeline", "model") if spec.pipeline > 1 else ()
        self._states = host.states
        self._state_starts = [state.start_ns for state in host.states]
        works = (work for stream in host.streams.values() for work in stream.works)
        self._works = sorted(works, key=lambda work: work.started)
        self._starts = [work.started for work in self._works]
        self._next = 0
        self._active: list[Work] = []
        # An idle interval may go on in the next window.
        self._was_idle = self._gap_after_sync = False
        changes = {time for work in self._works for time in (work.started, work.ended)}
        changes |= {state.start_ns for state in host.states} | {state.end_ns for state in host.states}
        for work in self._works:
            for collective in work.collectives:
                changes.add(collective.last_arrival_ns)
                if collective.end_ns is not None:
                    changes.add(collective.end_ns)
        self._changes = sorted(changes)

    def _activate(self, time: int) -> list[Work]:
        """What runs at a time no earlier than any asked for before."""
        self._active = [work for work in self._active if work.ended > time]
        while self._next < len(self._works) and self._starts[self._next] <= time:
            work = self._works[self._next]
            self._next += 1
            if work.ended > time:
                self._active.append(work)
        return self._active

    def window(self, step: int, start: int, end: int) -> Window:
        """The window ``[start, end)``; windows come in order."""
        categories = dict.fromkeys(CATEGORIES, 0)
        comm = mixed = after_sync = doubtful = 0
        bubbles: list[tuple[int, int]] = []
        inner = self._changes[bisect.bisect_right(self._changes, start) : bisect.bisect_left(self._changes, end)]
        for begin, stop in zip([start, *inner], [*inner, end], strict=True):
            length = stop - begin
            active = self._activate(begin)
            communicating = [work for work in active if work.kind == "comm"]
            category = self._category(begin, active, communicating)
            categories[category] += length
            comm += length if communicating else 0
            if category == "exposed_comm_transfer":
                mixed += length if any(work.waits(begin) for work in communicating) else 0
            elif category == "exposed_comm_wait":
                self._note_bubble(bubbles, communicating, begin, stop)
            elif category == "compute" and not self._on_device:
                doubtful += length if self._state(begin) != "operator" else 0
            idle = category.startswith("idle_")
            if idle and not self._was_idle:
                self._gap_after_sync = self._state(begin) == "sync"
            self._was_idle = idle
            after_sync += length if idle and self._gap_after_sync and category != "idle_dataloader" else 0
        return Window(self._rank, step, start, end, categories, comm, after_sync, doubtful, mixed, tuple(bubbles))

    def _note_bubble(
        self, bubbles: list[tuple[int, int]], communicating: Sequence[Work], begin: int, stop: int
    ) -> None:
        groups = [work.collective.group for work in communicating if work.collective is not None]
        if not any(group is not None and group.role in self._roles for group in groups):
            return
        if bubbles and bubbles[-1][1] == begin:
            begin = bubbles.pop()[0]
        bubbles.append((begin, stop))

    def _category(self, time: int, active: Sequence[Work], communicating: Sequence[Work]) -> str:
        if any(work.kind == "compute" for work in active):
            return "compute"
        if not self._on_device and _IDLE[self._state(time)] == "idle_launch":
            return "compute"
        if communicating:
            return "exposed_comm_wait" if all(work.waits(time) for work in communicating) else "exposed_comm_transfer"
        if active:
            return "exposed_copy"
        following = bisect.bisect_left(self._starts, time)
        if self._on_device and following < len(self._works) and self._works[following].queued_ns <= time:
            return "idle_dependency"
        return _IDLE[self._state(time)]

    def _state(self, time: int) -> str:
        index = bisect.bisect_right(self._state_starts, time) - 1
        if index < 0 or time >= self._states[index].end_ns:
            return "host"
        return self._states[index].state
