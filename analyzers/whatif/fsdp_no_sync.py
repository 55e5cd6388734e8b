"""FSDP under gradient accumulation: gradients reduced once per step.

FSDP scatters a unit's gradients after each of its backwards. With ``set_requires_gradient_sync(False)`` (FSDP2), or
under ``no_sync`` (FSDP1), it adds them up whole and scatters the sums after the last micro-batch. Parameters are
gathered and freed as before. Adding takes what copying for the reduction took, and reads the sum besides.
"""

from __future__ import annotations

from itertools import chain

from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.whatif.change import (
    MEMORY_GBPS,
    REDUCED_ONCE,
    CannotReplay,
    Context,
    Setting,
    Uncertainty,
    flag,
)
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.analyzers.whatif.schedules.ops import RankOp
from perfscope.analyzers.whatif.schedules.steps import StepOps
from perfscope.grouping import grouped
from perfscope.results.categories import TimeCategory


def _fsdp_no_sync(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    """Scatter the sums of a step's gradients once, after the last micro-batch's backward."""
    if not flag(name, value):
        raise CannotReplay(f"{name}=false: the recording does not show how long the additional reductions would take")
    context.refuse_cleared(name)
    scatters = schedules.of_gradients("reduce_scatter")
    if not scatters:
        raise CannotReplay(f"{name}: no reductions of FSDP's gradients are recorded")
    reduced = schedules.by_step("all_reduce")
    dropped: set[RankOp] = set()
    for (rank, step), mine in scatters.items():
        microbatches = context.result.partials[rank].microbatches(step)
        step_ops = StepOps(schedules, rank, step)
        dropped.update(step_ops.before_last(mine, microbatches))
        # Shards that are reduced between replicas, too (HYBRID_SHARD): one all-reduce after each scatter.
        by_group = grouped((each.collective.group, each) for each in reduced.get((rank, step), ()))
        for between in by_group.values():
            if len(between) == len(mine):
                dropped.update(step_ops.before_last(between, microbatches))
    if not dropped:
        raise CannotReplay(f"{name}: {REDUCED_ONCE}")
    if context.on_devices:
        _add_up(schedules, {rank_op for rank_op in dropped if rank_op.moves("reduce_scatter")})
    schedules.without(dropped)
    return Uncertainty(less=0.25, more=0.15)


def _add_up(schedules: EditableSchedules, dropped: set[RankOp]) -> None:
    """Where each of the scatters was issued, read the sum of the gradients so far: as many bytes as it moved."""
    for op in chain.from_iterable(schedules.ops.values()):
        if op.kind is OpKind.ISSUE and op.rank_op in dropped:
            op.add(TimeCategory.COMPUTE, op.rank_op.bytes / MEMORY_GBPS)


SETTINGS = (
    Setting(
        "fsdp.no_sync", "true", "reduce FSDP's gradients after the last micro-batch only", _fsdp_no_sync, 1,
        with_hosts=True,
    ),
)  # fmt: skip
