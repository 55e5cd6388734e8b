"""Everything that is asked of one rank's trace, where the trace is; only this small partial travels back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from perfscope.analyzers import readers
from perfscope.analyzers.account import account
from perfscope.analyzers.attribution import attribute
from perfscope.analyzers.collectives.communication import Collectives
from perfscope.analyzers.collectives.of_rank import find_collectives
from perfscope.analyzers.flops.of_rank import RankFlops, rank_flops
from perfscope.analyzers.host_activity import HostActivity, host_activity, loader_rows
from perfscope.analyzers.intervals import Intervals
from perfscope.analyzers.launches import device_work
from perfscope.analyzers.pipelines.passes import Passes, find_passes
from perfscope.analyzers.rank_lanes import RankLanes, rank_lanes
from perfscope.analyzers.rank_memory import MemoryUse, rank_memory
from perfscope.analyzers.replay.progress import Progress, progress
from perfscope.analyzers.steps import Steps, find_steps
from perfscope.analyzers.timeline import Timeline
from perfscope.analyzers.work.of_rank import RankTables, rank_tables
from perfscope.custom_flops import CustomFlops
from perfscope.errors import TraceError
from perfscope.trace import NONE, Category, Device, Int64, Losses, Trace

DDP_FORWARD: Final = "DistributedDataParallel.forward"

_STRATEGY_MARKS: Final = {
    "ddp": (DDP_FORWARD,),
    "fsdp": ("FullyShardedDataParallel.", "FSDP::"),
}
"""Strategy -> beginnings of the ranges that torch.distributed itself records for it."""


@dataclass(frozen=True, eq=False)
class Loading:
    """One rank's data loading. Arrays have one entry a step."""

    waited_ns: Int64
    """Time inside ``__next__`` in the step's host window."""
    batches: Int64
    """Calls of ``__next__`` begun in the step's host window."""
    single_process: bool | None
    """The iterator loads in the training process itself (no workers); None when the name does not tell."""


@dataclass(frozen=True, eq=False)
class RankPartial:
    """What one rank contributes to the job's analysis. Times are ns on the rank's own clock."""

    source: str
    rank: int | None
    world_size: int | None
    backend: str
    host: str
    devices: tuple[Device, ...]
    """The devices that this rank's work ran on; empty on a rank without device work."""
    lists_devices: bool
    """The trace describes devices, whether or not it holds work of theirs."""
    has_device_work: bool
    steps: Steps
    timeline: Timeline
    """All exposed communication is COMM_TRANSFER until the ranks are compared."""
    communication: Intervals
    named_host: dict[str, Intervals]
    collectives: Collectives
    progress: Progress
    loading: Loading
    forwards: Int64
    """Forward passes of a DistributedDataParallel module begun in each step: micro-batches, where gradients
    accumulate."""
    passes: Passes
    """Of micro-batches through a pipeline; none where nothing marks them."""
    flops: RankFlops
    tables: RankTables
    lanes: RankLanes
    """One step's events, for a picture."""
    memory: tuple[MemoryUse, ...]
    """What its allocators held; empty where that was not recorded."""
    has_shapes: bool
    strategies: tuple[str, ...]
    """Parallel strategies that leave ranges of a known name in a trace; empty where none did."""
    versions: dict[str, str]
    losses: Losses


def analyze_file(path: Path, part: str | None = None, flops: CustomFlops | None = None) -> RankPartial:
    """Read one rank's trace and ask every per-rank question of it. Raises TraceError naming the file.

    ``part`` is the rank meant in a file that holds several (``readers.parts``), ``flops`` the user's own formulas.
    """
    return analyze_rank(readers.read(path, part), flops)


def analyze_rank(trace: Trace, flops: CustomFlops | None = None) -> RankPartial:
    """Every per-rank question, asked of one trace. Raises TraceError when nothing in it can be accounted for."""
    work = device_work(trace)
    try:
        steps = find_steps(trace, work)
    except ValueError as error:
        raise TraceError(f"{trace.source}: {error}; record the rank again, or leave this file out") from error
    host = host_activity(trace, work)
    result = account(trace, work, host, int(steps.start_ns[0]), int(steps.end_ns[-1]))
    collectives = find_collectives(trace, work, steps)
    attribution = attribute(trace, work, steps, flops)
    used = {int(index) for index in np.unique(trace.device[work.row])} if len(work) else set()
    return RankPartial(
        source=trace.source,
        rank=trace.rank,
        world_size=trace.world_size,
        backend=trace.backend,
        host=trace.host,
        devices=tuple(device for device in trace.devices if device.index in used),
        lists_devices=len(trace.devices) > 0,
        has_device_work=len(work) > 0,
        steps=steps,
        timeline=result.timeline,
        communication=result.communication,
        named_host=host.named,
        collectives=collectives,
        progress=progress(trace, work, host, collectives, result.timeline, steps),
        loading=_loading(trace, host, steps),
        forwards=_forwards(trace, host, steps),
        passes=find_passes(trace, work, steps),
        flops=rank_flops(trace, work, steps, attribution),
        tables=rank_tables(trace, work, steps, attribution, host, result.timeline),
        lanes=rank_lanes(trace, work, attribution, host, steps),
        memory=rank_memory(trace, steps),
        has_shapes=bool((trace.shapes[trace.rows(Category.CPU_OP)] != NONE).any()),
        strategies=tuple(
            name for name, marks in _STRATEGY_MARKS.items() if any(text.startswith(marks) for text in trace.strings)
        ),
        versions=trace.versions,
        losses=trace.losses,
    )


def _forwards(trace: Trace, host: HostActivity, steps: Steps) -> Int64:
    hit = trace.names_where(lambda name: name == DDP_FORWARD)
    rows = np.flatnonzero(hit & np.isin(trace.thread, host.threads) & (trace.category == Category.ANNOTATION))
    begun = steps.of_host_time(trace.start_ns[rows])
    return np.bincount(begun[begun >= 0], minlength=len(steps)).astype(np.int64)


def _loading(trace: Trace, host: HostActivity, steps: Steps) -> Loading:
    rows = loader_rows(trace, host.threads)
    begun = steps.of_host_time(trace.start_ns[rows])
    names = {trace.name_of(row) for row in rows}
    single = {"_SingleProcess" in name for name in names if "Process" in name}
    return Loading(
        waited_ns=host.loading.within(steps.host_start_ns, steps.host_end_ns),
        batches=np.bincount(begun[begun >= 0], minlength=len(steps)).astype(np.int64),
        single_process=single.pop() if len(single) == 1 else None,
    )
