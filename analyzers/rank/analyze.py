"""Analyzes one rank's trace in the process that read it; only the small ``RankPartial`` travels back."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

import numpy as np

from perfscope.analyzers.rank.attribution import Attribution, attribute
from perfscope.analyzers.rank.collectives.autograd import operators_of_model
from perfscope.analyzers.rank.collectives.collectives import Collectives
from perfscope.analyzers.rank.collectives.host import on_host
from perfscope.analyzers.rank.collectives.kernels import on_device
from perfscope.analyzers.rank.extra.extra_work import (
    bucket_copies,
    buffer_copies,
    conversions,
    gather_copies,
    optimizer_loops,
    recomputation,
    searches,
)
from perfscope.analyzers.rank.extra.loop_work import loop_work, parts_of_loop
from perfscope.analyzers.rank.extra.model_loops import model_loops
from perfscope.analyzers.rank.extra.operator_loops import operator_loops
from perfscope.analyzers.rank.host_activity import (
    EVALUATING,
    SAVING,
    HostActivity,
    host_activity,
    loader_rows,
    training_threads,
)
from perfscope.analyzers.rank.host_events import host_events
from perfscope.analyzers.rank.implied.host_lanes import with_host_lanes
from perfscope.analyzers.rank.implied.waits import with_implied_waits
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.lanes import ranges_by_name, rank_lanes
from perfscope.analyzers.rank.launches import DeviceWork, device_work
from perfscope.analyzers.rank.loop_phases import AUTOGRAD, DDP_FORWARD, STRETCHES
from perfscope.analyzers.rank.memory import rank_memory
from perfscope.analyzers.rank.partial import Loading, RankPartial
from perfscope.analyzers.rank.passes import find_passes
from perfscope.analyzers.rank.progress import progress
from perfscope.analyzers.rank.repetition import edges_by_batches, edges_by_repetition
from perfscope.analyzers.rank.steps import Steps, find_steps, lost_work
from perfscope.analyzers.rank.time_breakdown import time_breakdown
from perfscope.analyzers.rank.timeline import Progress, Timeline
from perfscope.analyzers.rank.work.compiled_times import compiled_times
from perfscope.analyzers.rank.work.flops import rank_flops
from perfscope.analyzers.rank.work.gap_times import gap_times
from perfscope.analyzers.rank.work.gradients import gradient_bytes, reduced_gradients
from perfscope.analyzers.rank.work.kernel_times import classed_work, kernel_times
from perfscope.analyzers.rank.work.launch_times import launch_times
from perfscope.analyzers.rank.work.operator_times import operator_times
from perfscope.analyzers.rank.work.quickest import quickest_times
from perfscope.analyzers.rank.work.range_times import module_times, sync_times
from perfscope.analyzers.rank.work.tables import RankTables
from perfscope.errors import TraceError
from perfscope.recording.vocabulary import DATALOADER_START, FORWARD
from perfscope.text import rank_list
from perfscope.trace.custom_flops import CustomFlops
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Bool, Category, Device, Int64, ParseReport, Trace

_OF_DEVICES: Final = re.compile(
    r"aten::_?(cudnn_(?!is_acceptable)|miopen_|(scaled_dot_product_)?(flash|efficient)_attention(_forward|_backward)?$)"
    r"|triton_"
)
"""Operators that only devices run; CPUs have their own attention (``…_for_cpu``)."""

_NEW_GRADIENTS: Final = re.compile(r"^Optimizer\.(step|zero_grad)#")
"""Where gradients that were summed up so far are used, or thrown away."""

_OF_WHOLE_MODELS: Final = ("FullyShardedDataParallel.forward", "FSDP::root_pre_forward")
"""Ranges that FSDP1 and FSDP2 record once in a forward of the whole model."""

_STRATEGY_MARKS: Final = {
    "ddp": (DDP_FORWARD,),
    "fsdp": ("FullyShardedDataParallel.", "FSDP::"),
    "zero1": ("Optimizer.step#ZeroRedundancyOptimizer.",),
}
"""Strategy -> prefixes of the ranges that torch.distributed itself records for it."""


def analyze_rank(trace: Trace, flops: CustomFlops | None = None) -> RankPartial:
    """Run every analysis of one rank. Raises TraceError when the trace has no event that could bound a step."""
    trace, work = _trace_and_work(trace)
    try:
        steps = find_steps(trace, work, training_threads(trace, work), edges_by_batches, edges_by_repetition)
    except ValueError as error:
        raise TraceError(f"{trace.source}: {error}; record the rank again, or leave this file out") from error
    work = replace(work, incomplete=lost_work(trace.parse_report, steps))
    host = host_activity(trace, work)
    timeline, communication = time_breakdown(trace, work, host, int(steps.start_ns[0]), int(steps.end_ns[-1]))
    attribution = attribute(trace, work, steps, flops)
    collectives = _collectives(trace, work, steps, host, attribution)
    used = {int(index) for index in distinct(trace.device[work.row])} if len(work) else set()
    parts = parts_of_loop(trace, work, steps, host)
    loops = operator_loops(trace, work, steps, host, attribution.operators, parts)
    own = progress(trace, work, host, collectives, timeline, steps)
    return RankPartial(
        source=trace.source,
        rank=trace.rank,
        world_size=trace.world_size,
        backend=trace.backend,
        host=trace.host,
        processes=_processes(trace),
        devices=_devices(trace, used),
        has_devices=len(trace.devices) > 0 or bool(trace.names_where(_OF_DEVICES.match).any()),
        has_device_work=len(work) > 0,
        steps=steps,
        timeline=timeline,
        communication=communication,
        pauses=host.pauses,
        named_host=host.named,
        ranges=ranges_by_name(trace, host, int(trace.end_ns.max() - trace.start_ns[0])),
        collectives=collectives,
        progress=own,
        loading=_loading(trace, host, steps),
        host_events=host_events(trace, host.threads),
        forwards=_forwards(trace, host, steps),
        keeps_gradients=_keeps_gradients(trace, host, steps),
        passes=find_passes(trace, work, steps),
        recomputation=recomputation(trace, work, steps, attribution),
        conversions=conversions(trace, work, steps),
        optimizer_loops=loops.optimizer or optimizer_loops(trace, work, steps),
        loops=loops,
        loop_work=(
            *loop_work(trace, work, steps, host, attribution.operators, parts, communication),
            *model_loops(trace, work, steps, host, attribution.operators),
        ),
        bucket_copies=bucket_copies(trace, work, steps),
        buffer_copies=buffer_copies(trace, work, steps),
        searches=searches(work, steps, host),
        gather_copies=gather_copies(trace, work, steps),
        reduced_gradients=reduced_gradients(trace, steps),
        gradient_bytes=gradient_bytes(trace, steps),
        flops=rank_flops(trace, work, steps, attribution),
        tables=_tables(trace, work, steps, attribution, host, timeline, own),
        lanes=rank_lanes(trace, work, attribution, host, steps),
        memory=rank_memory(trace, steps),
        has_shapes=bool((trace.shapes[trace.rows(Category.CPU_OP)] != NONE).any()),
        strategies=tuple(
            name for name, marks in _STRATEGY_MARKS.items() if any(text.startswith(marks) for text in trace.strings)
        ),
        versions=trace.versions,
        parse_report=_report(trace, work, steps),
    )


def _trace_and_work(trace: Trace) -> tuple[Trace, DeviceWork]:
    """The trace with what it only implies, and its device's work."""
    work = device_work(trace)
    for complete in (with_host_lanes, with_implied_waits):
        whole = complete(trace, work)
        if whole is not trace:
            trace, work = whole, device_work(whole)
    return trace, work


def _report(trace: Trace, work: DeviceWork, steps: Steps) -> ParseReport:
    """What the reader says, and what of the trace is not used."""
    report = trace.parse_report
    if work.made_up:
        text = (
            "calls that launch kernels come just before these, even where the device was busy until then: whatever "
            "wrote the trace derived them from the kernels, so they are not used"
        )
        report = replace(report, notes=(*report.notes, text))
    if steps.left_out and not report.truncated:
        which = f"{'step' if len(steps.left_out) == 1 else 'steps'} {rank_list(steps.left_out)}"
        text = (
            f"{which} launched kernels that are not in the recording (it ended before they ran, or lost them), so they "
            "are left out"
        )
        report = replace(report, notes=(*report.notes, text))
    return report


def _devices(trace: Trace, used: set[int]) -> tuple[Device, ...]:
    """Those of the trace's devices that work; where kernels do not state theirs, the only one that is listed."""
    listed = tuple(device for device in trace.devices if device.index in used)
    return trace.devices if not listed and len(trace.devices) == len(used) == 1 else listed


def _processes(trace: Trace) -> frozenset[int]:
    rows = trace.rows(Category.CPU_OP, Category.ANNOTATION, Category.RUNTIME)
    ids = {trace.threads[thread].pid for thread in distinct(trace.thread[rows]).tolist()}
    return frozenset(int(text) for text in ids if text.isdecimal())


def _collectives(
    trace: Trace, work: DeviceWork, steps: Steps, host: HostActivity, attribution: Attribution
) -> Collectives:
    """Communication kernels where the rank has device work, the backend's host ranges otherwise."""
    raw = on_device(trace, work) if len(work) else on_host(trace)
    again = attribution.recomputing
    saving, of_model = host.named.get(SAVING, Intervals.empty()), operators_of_model(trace, host.threads)
    stretches = [host.stretches[name].subtract(saving).subtract(of_model) for name in STRETCHES]
    return raw.collectives(steps, host.between.subtract(saving), stretches, Intervals.of(again.start_ns, again.end_ns))


def _tables(
    trace: Trace, work: DeviceWork, steps: Steps, attribution: Attribution, host: HostActivity, timeline: Timeline,
    own: Progress,
) -> RankTables:  # fmt: skip
    """One rank's part of every table. ``timeline`` is its time breakdown before the ranks are compared."""
    launches = launch_times(trace, work, steps)  # first: it needs the most memory
    classed = classed_work(trace, work, attribution)
    return RankTables(
        kernels=kernel_times(trace, work, steps, attribution, classed),
        operators=operator_times(trace, work, steps, attribution, classed),
        modules=module_times(trace, work, steps),
        launches=launches,
        gaps=gap_times(trace, host, own, steps, on_device=len(work) > 0),
        compiled=compiled_times(trace, work, steps, attribution),
        syncs=sync_times(trace, work, steps, host, timeline, attribution),
        quickest=quickest_times(trace, attribution.operators, steps, host.loading, on_device=len(work) > 0),
    )


def _forwards(trace: Trace, host: HostActivity, steps: Steps) -> Int64:
    evaluating = host.named[EVALUATING]
    for name in (DDP_FORWARD, FORWARD, *_OF_WHOLE_MODELS):
        # FSDP1 records the forward of every unit, within that of the whole model.
        whole = Intervals.of_rows(trace, trace.rows(Category.ANNOTATION, named=name.__eq__, threads=host.threads))
        if len(begun := whole.start_ns):
            return steps.count(steps.of_host_time(begun[~evaluating.covers(begun)]))
    return np.zeros(len(steps), dtype=np.int64)


def _keeps_gradients(trace: Trace, host: HostActivity, steps: Steps) -> Bool:
    functions = np.sort(trace.start_ns[trace.rows(Category.CPU_OP, named=AUTOGRAD.match)])
    rows = trace.rows(Category.ANNOTATION, Category.CPU_OP, named=_NEW_GRADIENTS.match, threads=host.threads)
    ends = np.sort(trace.start_ns[rows])
    if not len(functions):
        return np.ones(len(steps), dtype=np.bool_)
    within = np.searchsorted(functions, (steps.host_start_ns, steps.host_end_ns))
    has_backward = within[1] > within[0]
    first, last = functions[np.minimum(within[0], len(functions) - 1)], functions[within[1] - 1]
    cleared = np.searchsorted(ends, last) > np.searchsorted(ends, first)
    return np.asarray(~(has_backward & cleared), dtype=np.bool_)


def _loading(trace: Trace, host: HostActivity, steps: Steps) -> Loading:
    rows = loader_rows(trace, host.threads)
    names = {trace.name_of(row) for row in rows}
    single = {"_SingleProcess" in name for name in names if "Process" in name}
    delivers = _delivers(trace, host, rows)
    return Loading(
        start_ns=trace.start_ns[rows],
        end_ns=trace.ends_ns(rows),
        sampling=host.sampling,
        waited_ns=host.loading.within(steps.host_start_ns, steps.host_end_ns),
        sampled_ns=host.loading.intersect(host.sampling).within(steps.host_start_ns, steps.host_end_ns),
        batches=steps.count(steps.of_host_time(trace.start_ns[rows[delivers]])),
        single_process=single.pop() if len(single) == 1 else None,
    )


def _delivers(trace: Trace, host: HostActivity, rows: Int64) -> Bool:
    """Which calls of ``__next__`` return a batch, as far as that is known: the loader that ends an epoch starts anew
    before anything is done with what its last call returned.
    """
    never = np.iinfo(np.int64).max
    forwards, starting = (
        np.sort(trace.start_ns[trace.rows(Category.ANNOTATION, named=name.__eq__, threads=host.threads)])
        for name in (FORWARD, DATALOADER_START)
    )
    if not len(forwards):
        return np.ones(len(rows), dtype=np.bool_)
    ended = trace.ends_ns(rows)
    following = [np.append(times, never)[np.searchsorted(times, ended)] for times in (starting, forwards)]
    restarted, used = following
    delivers: Bool = restarted >= np.minimum(used, np.append(trace.start_ns[rows[1:]], never))
    return delivers
