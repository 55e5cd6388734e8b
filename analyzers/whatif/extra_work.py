"""Settings that leave out work that need not be done: activations computed again, changes of memory layout, the many
kernels of an optimizer that loops over parameters, other loops over many tensors, collectives that the training loop
calls for itself, DDP's searches for unused parameters, and its broadcasts of buffers that are the same on all ranks
anyway.

The recording shows when a rank does it (``schedules.extra_work`` leaves it out). What would take its place is not
replayed: without recomputation the forward keeps its tensors, and convolutions on tensors whose channels are last run
other kernels. What the loop does with metrics besides (pickling objects, copying numbers to the host) stays, and waits
for late ranks move to the next collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Final

from perfscope.analyzers.rank.extra.extra_work import FEW
from perfscope.analyzers.rank.host_lane import HostTime
from perfscope.analyzers.rank.loop_phases import IN_OPTIMIZER
from perfscope.analyzers.rank.partial import ExtraWork, RankPartial
from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.whatif.change import BadSetting, CannotReplay, Context, Setting, Uncertainty, flag, number
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.analyzers.whatif.schedules.extra_work import OF_HOST, leave_out
from perfscope.analyzers.whatif.schedules.ops import RankOp
from perfscope.grouping import grouped
from perfscope.trace.trace import NONE, Int64

_OF_FORWARD: Final = ("all_reduce", "all_to_all", "reduce_scatter")
"""Collectives of activations: in a forward nobody sends gradients."""


def _left_out(
    of: Callable[[RankPartial], ExtraWork], missing: str, sure: Uncertainty,
    schedules: EditableSchedules, context: Context, name: str, value: str, *, rows: Sequence[HostTime] = OF_HOST,
) -> Uncertainty:  # fmt: skip
    """``value`` times such work, of which hosts do their part by ``rows``. Raises CannotReplay, with ``missing``, where
    none is recorded.
    """
    left = number(name, value, "the share of it that is left, from 0 (none) to 1 (all)", zero=True)
    result = context.result
    every = {rank: of(result.partials[rank]) for rank in schedules.ops}
    if not any(work.count[_used(context, rank)].any() for rank, work in every.items()):
        raise CannotReplay(f"{name}: {missing}")
    for rank, work in every.items():
        leave_out(schedules, result, rank, work, 1 - left, rows)
        if not schedules.hosts and result.partials[rank].has_device_work and rank not in context.paced:
            steps, used = result.partials[rank].steps, _used(context, rank)
            host_ns = float(work.host.within(steps.host_start_ns[used], steps.host_end_ns[used]).mean())
            schedules.at_least(rank, max(context.host_busy_ns(rank) - (1 - left) * host_ns, 0.0))
    return sure


def _used(context: Context, rank: int) -> Int64:
    """Indices of the used steps in a rank's own."""
    return context.result.partials[rank].steps.indices_of(context.result.steps)


_not_computed_again = partial(
    _left_out,
    attrgetter("recomputation"),
    "the recording shows no forward that runs again in the backward",
    Uncertainty(less=0.20, more=0.20),
)
_conversions = partial(
    _left_out,
    attrgetter("conversions"),
    "the recording shows no kernels that write tensors with their channels last around convolutions",
    Uncertainty(less=0.25, more=1.00),
)
_no_loops = partial(
    _left_out,
    attrgetter("optimizer_loops"),
    f"the recording marks no optimizer step that launches more than {FEW} kernels, or loops over tensors",
)
_no_searches = partial(
    _left_out,
    attrgetter("searches"),
    "no search of DistributedDataParallel's for unused parameters is recorded",
    Uncertainty(less=0.10, more=0.25),
    rows=(HostTime.SEARCH,),
)
_no_operators = partial(
    _left_out,
    attrgetter("loops.others"),
    "the recording shows no loop over many tensors between the phases of a step",
)


def _recomputation(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    sure = _not_computed_again(schedules, context, name, value)
    left = number(name, value, "a share", zero=True)
    again = _sent_again(schedules, max(1 - left, 0.0))
    for rank_op in again:
        rank_op.gap_ns = rank_op.transfer_ns = rank_op.late_ns = rank_op.after_gap_ns = 0.0
    for ops in schedules.ops.values():
        for place, op in enumerate(ops):
            if op.rank_op in again and op.kind is not OpKind.ISSUE:
                # A mark of nothing: other changes find as many ops as were recorded.
                ops[place] = replace(op, kind=OpKind.MARK, mark=NONE, rank_op=None, lag_ns=0.0)
    return sure


def _sent_again(schedules: EditableSchedules, share: float) -> set[RankOp]:
    """What all ranks send in that share of the forwards that run again, the first ones of each step and group.

    A backward needs the parameters that FSDP gathers, whether or not its forward runs again. Gathers count in groups
    that reduce and scatter in such forwards, too: those of sequence parallelism, whose activations are sharded.
    """
    again = {
        collective: rank_ops
        for collective, rank_ops in schedules.collectives().items()
        if all(rank_op.again for rank_op in rank_ops)
    }
    scattering = {collective.group for collective in again if collective.kind == "reduce_scatter"}
    sent = grouped(
        ((collective.step, collective.group), rank_ops)
        for collective, rank_ops in again.items()
        if collective.kind in _OF_FORWARD or (collective.kind == "all_gather" and collective.group in scattering)
    )
    return {
        rank_op
        for collectives in sent.values()
        for rank_ops in collectives[: round(share * len(collectives))]
        for rank_op in rank_ops
    }


def _loops(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    # On CPUs a fused optimizer reads each tensor once, where a loop's operators read it one after the other.
    sure = Uncertainty(less=0.25, more=0.25 if context.on_devices else 0.75)
    return _no_loops(sure, schedules, context, name, value)


def _operators(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    # A call for all tensors may compute in one pass what the loop does in many: at most the whole loop is spared.
    more = 0.60 if context.on_devices else max((_arithmetic(context, rank) for rank in schedules.ops), default=0.0)
    return _no_operators(Uncertainty(less=0.40, more=more), schedules, context, name, value)


def _arithmetic(context: Context, rank: int) -> float:
    """What one call for all leaves of the loops over many tensors on a CPU, as a multiple of what it spares."""
    partial, used = context.result.partials[rank], _used(context, rank)
    took_ns = sum(float(part.took_ns[used].sum()) for part in partial.loops.parts if part.name != IN_OPTIMIZER)
    spared_ns = float(partial.loops.others.host.within(*context.result.windows[rank]).sum())
    return took_ns / spared_ns - 1 if spared_ns else 0.0


def _no_collectives(schedules: EditableSchedules, _: Context, name: str, value: str) -> Uncertainty:
    if value != "0":
        raise BadSetting(f"{name}={value}: write 0; the recording does not show what more of them would take")
    called = {rank_op for rank_op in schedules.issued() if rank_op.collective.of_loop}
    if not called:
        raise CannotReplay(f"{name}: no small collectives are recorded that the training loop calls for itself")
    schedules.without(called)
    return Uncertainty(less=0.25, more=0.50)


def _each_its_statistics(schedules: EditableSchedules, _: Context, name: str, value: str) -> Uncertainty:
    if flag(name, value):
        raise CannotReplay(f"{name}=true: the recording does not show how long gathering statistics would take")
    sent = {rank_op for rank_op in schedules.issued() if rank_op.of_norm}
    if not sent:
        raise CannotReplay(f"{name}: no collectives of synchronized batch normalizations are recorded")
    schedules.without(sent)
    return Uncertainty(less=0.25, more=0.25)


def _no_buffers(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    if flag(name, value):
        raise CannotReplay(f"{name}=true: the recording does not show how long broadcasts of buffers would take")
    strategies = {strategy for partial in context.result.partials.values() for strategy in partial.strategies}
    strategies.update(strategy for run in context.runs.values() for strategy in run.strategies)
    # ZeRO broadcasts the parameters of each part, too.
    sent = {
        rank_op
        for rank_op in schedules.issued()
        if rank_op.collective.kind == "broadcast" and not rank_op.collective.between and not rank_op.backward
    }
    if "ddp" not in strategies or any(each.startswith("zero") for each in strategies) or not sent:
        raise CannotReplay(f"{name}: no broadcasts of DistributedDataParallel's buffers are recorded")
    for rank in schedules.ops:
        leave_out(schedules, context.result, rank, context.result.partials[rank].buffer_copies)
    schedules.without(sent)
    return Uncertainty(less=0.15, more=0.25)


def _all_used(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    if flag(name, value):
        raise CannotReplay(f"{name}=true: the recording does not show how long a search through the graph would take")
    return _no_searches(schedules, context, name, "0")


SETTINGS = (
    Setting("activations.recompute", "SHARE", "the share of activation checkpointing that is left; 0: none",
            _recomputation, -1, with_hosts=True, of_host_work=True),
    Setting("layout.conversions", "SHARE", "the share of conversions to channels last around convolutions that is left",
            _conversions, -1, with_hosts=True, of_host_work=True),
    Setting("optimizer.loops", "SHARE", "the share of the optimizer's kernels but for a few that is left; 0: foreach",
            _loops, -1, with_hosts=True, of_host_work=True),
    Setting("loop.operators", "SHARE", "the share of other loops over many tensors that is left; 0: one call for all",
            _operators, -1, with_hosts=True, of_host_work=True),
    Setting("ddp.broadcast_buffers", "false", "no broadcast of the model's buffers before each forward",
            _no_buffers, 1, with_hosts=True),
    Setting("ddp.find_unused_parameters", "false", "no search for unused parameters, or one in all (static_graph=True)",
            _all_used, -1, with_hosts=True, of_host_work=True),
    Setting("batch_norm.sync", "false", "BatchNorm instead of SyncBatchNorm: each rank has its own statistics",
            _each_its_statistics, 1, with_hosts=True),
    Setting("loop.collectives", "0", "no small collectives of the training loop itself: metrics, barriers",
            _no_collectives, 1, with_hosts=True),
)  # fmt: skip
