"""What is true of a simulated job, from the simulation's own state and never from the events that are written.

The account follows the definitions in words: every elementary stretch between two changes of anything goes to exactly
one row. Host windows (gloo) are the ranges ``ProfilerStep#k``; device windows begin with the first kernel issued in
step k, end where the next begins, and the last ends with its last work on the device, copies included.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tests.generator.engine import Collective, Host, Work
from tests.generator.loader import Delivery
from tests.generator.spec import JobSpec

ROWS = (
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
    rows: dict[str, int]
    comm_ns: int
    """Time in which a collective ran; hidden is what the exposed rows leave of it."""
    idle_after_sync_ns: int
    """Idle stretches that began while the process was in a synchronising call, whole, what the loader took left out:
    the most that ``idle_sync`` can be, as ``rows`` has the least."""
    doubtful_compute_ns: int
    """On CPUs, the part of compute that is only the framework's: handing a collective over, or autograd's own time
    around an operator. Whether that is an operator at work is a matter of definition."""
    mixed_comm_ns: int
    """Exposed time in which one collective waited and another transferred; ``rows`` counts it as transfer."""

    @property
    def duration_ns(self) -> int:
        """Length of the step."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class CollectiveTruth:
    """All recorded collectives of one kind and size."""

    kind: str
    bytes: int
    elements_in: int
    elements_out: int
    count: int
    transfer_ns: float
    """Mean over instances: alpha + f(n) bytes / busbw."""
    wait_ns: float
    """Mean over instances and ranks."""
    last_arriver: dict[int, float]


@dataclass(frozen=True)
class Truth:
    """Everything known of a job."""

    windows: dict[int, tuple[Window, ...]]
    step_time_ns: float
    """Mean window of the slowest rank."""
    clock_correction_ns: dict[int, int]
    """What must be added to each rank's clock to meet the lowest rank's."""
    collectives: tuple[CollectiveTruth, ...]
    flops_per_step: int
    """Forward and backward of all ranks."""
    deliveries: dict[int, tuple[Delivery, ...]]
    """Batches taken in the recorded steps."""

    def mean_ns(self, rank: int, row: str) -> float:
        """Mean of one row per step."""
        return sum(window.rows[row] for window in self.windows[rank]) / len(self.windows[rank])

    def step_ns(self, rank: int) -> float:
        """Mean window of one rank."""
        return sum(window.duration_ns for window in self.windows[rank]) / len(self.windows[rank])


def establish(
    spec: JobSpec, hosts: Sequence[Host], collectives: Sequence[Collective], deliveries: dict[int, list[Delivery]]
) -> Truth:
    """The truth of a finished simulation."""
    windows = {host.rank: tuple(_windows(spec, host)) for host in hosts}
    offsets = {host.rank: spec.clock_offsets_ns.get(host.rank, 0) for host in hosts}
    recorded = set(spec.recorded_steps)
    return Truth(
        windows=windows,
        step_time_ns=max(sum(w.duration_ns for w in mine) / len(mine) for mine in windows.values()),
        clock_correction_ns={rank: offsets[0] - offset for rank, offset in offsets.items()},
        collectives=_collectives([collective for collective in collectives if collective.step in recorded]),
        flops_per_step=spec.ranks * spec.model.flops_per_step,
        deliveries={rank: tuple(d for d in mine if d.step in recorded) for rank, mine in deliveries.items()},
    )


def _collectives(collectives: Sequence[Collective]) -> tuple[CollectiveTruth, ...]:
    alike: dict[tuple[str, int], list[Collective]] = defaultdict(list)
    for collective in collectives:
        alike[collective.kind, collective.bytes].append(collective)
    result = []
    for (kind, size), group in sorted(alike.items()):
        waits = [c.last_arrival_ns - work.started for c in group for work in c.works.values()]
        last = [max(c.works.values(), key=lambda work: work.started).rank for c in group]
        result.append(
            CollectiveTruth(
                kind=kind,
                bytes=size,
                elements_in=group[0].elements_in,
                elements_out=group[0].elements_out,
                count=len(group),
                transfer_ns=sum(c.cost_ns for c in group) / len(group),
                wait_ns=sum(waits) / len(waits),
                last_arriver={rank: last.count(rank) / len(last) for rank in sorted(set(last))},
            )
        )
    return tuple(result)


def _windows(spec: JobSpec, host: Host) -> list[Window]:
    works = sorted((work for stream in host.streams.values() for work in stream.works), key=lambda work: work.started)
    bounds = _device_bounds(spec, works) if spec.backend == "nccl" else _host_bounds(spec, host)
    sweep = _Sweep(host, works, on_device=spec.backend == "nccl")
    return [
        sweep.window(host.rank, step, start, end)
        for step, (start, end) in zip(spec.recorded_steps, bounds, strict=True)
    ]


def _device_bounds(spec: JobSpec, works: Sequence[Work]) -> list[tuple[int, int]]:
    kernels = [work for work in works if work.kind in ("compute", "comm")]
    starts = []
    for step in spec.recorded_steps:
        first = min((work for work in kernels if work.step == step), key=lambda work: work.queued_ns)
        starts.append(first.started)
    last = max(work.ended for work in works if work.step == spec.recorded_steps[-1])
    return list(zip(starts, [*starts[1:], last], strict=True))


def _host_bounds(spec: JobSpec, host: Host) -> list[tuple[int, int]]:
    names = {f"ProfilerStep#{step}" for step in spec.recorded_steps}
    return [(event.start_ns, event.end_ns) for event in host.events if event.name in names]


class _Sweep:
    """Goes through a window from change to change."""

    def __init__(self, host: Host, works: Sequence[Work], on_device: bool) -> None:
        self._states = host.states
        self._state_starts = [state.start_ns for state in host.states]
        self._on_device = on_device
        self._works = [(work.started, work.ended, work) for work in works if work.ended > work.started]
        self._starts = [start for start, _, _ in self._works]
        changes = {time for start, end, work in self._works for time in (start, end, work.queued_ns)}
        changes |= {work.collective.last_arrival_ns for work in works if work.collective is not None}
        changes |= {time for state in host.states for time in (state.start_ns, state.end_ns)}
        self._changes = sorted(changes)

    def window(self, rank: int, step: int, start: int, end: int) -> Window:
        """Account for ``[start, end)``."""
        rows = dict.fromkeys(ROWS, 0)
        comm = mixed = after_sync = doubtful = 0
        gap_after_sync, was_idle = False, False
        inner = self._changes[bisect.bisect_right(self._changes, start) : bisect.bisect_left(self._changes, end)]
        near = [entry for entry in self._works if entry[0] < end and entry[1] > start]
        for begin, stop in zip([start, *inner], [*inner, end], strict=True):
            length = stop - begin
            active = [work for first, last, work in near if first <= begin < last]
            communicating = [work for work in active if work.kind == "comm"]
            row = self._row(begin, active, communicating)
            rows[row] += length
            comm += length if communicating else 0
            phases = {self._waits(work, begin) for work in communicating}
            mixed += length if row == "exposed_comm_transfer" and len(phases) == 2 else 0
            doubtful += length if row == "compute" and not self._on_device and self._state(begin) != "operator" else 0
            idle = row.startswith("idle_")
            if idle and not was_idle:
                gap_after_sync = self._state(begin) == "sync"
            was_idle = idle
            after_sync += length if idle and gap_after_sync and row != "idle_dataloader" else 0
        return Window(rank, step, start, end, rows, comm, after_sync, doubtful, mixed)

    def _row(self, time: int, active: Sequence[Work], communicating: Sequence[Work]) -> str:
        state = self._state(time)
        if any(work.kind == "compute" for work in active) or (not self._on_device and _IDLE[state] == "idle_launch"):
            return "compute"
        if communicating:
            return "exposed_comm_wait" if all(self._waits(w, time) for w in communicating) else "exposed_comm_transfer"
        if active:
            return "exposed_copy"
        following = bisect.bisect_left(self._starts, time)
        if self._on_device and following < len(self._works) and self._works[following][2].queued_ns <= time:
            return "idle_dependency"
        return _IDLE[state]

    @staticmethod
    def _waits(work: Work, time: int) -> bool:
        assert work.collective is not None
        return time < work.collective.last_arrival_ns

    def _state(self, time: int) -> str:
        index = bisect.bisect_right(self._state_starts, time) - 1
        if index < 0 or time >= self._states[index].end_ns:
            return "host"
        return self._states[index].state
