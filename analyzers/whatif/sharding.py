"""Settings of sharding: the ZeRO stage (FSDP's sharding strategy under another name), prefetch, overlap, reshard.

What each stage sends per step for P bytes of parameters (Rajbhandari et al., "ZeRO", SC'20, section 7): stage 0
all-reduces the gradients; stages 1 and 2 reduce-scatter them and all-gather the updated parameters once; stage 3
gathers parameters before each layer's forward and again before its backward, and reduce-scatters gradients.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Final

import numpy as np

from perfscope.analyzers.job.strategies import fsdp_by_ranges
from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.whatif.change import (
    BadSetting,
    CannotReplay,
    Context,
    Setting,
    Uncertainty,
    flag,
    keep_host_pace,
)
from perfscope.analyzers.whatif.gather_limit import (
    without_gathers,
    without_limit,
)
from perfscope.analyzers.whatif.gathers import Gathers, find_gathers, recorded_stage
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules, StepCollectives
from perfscope.analyzers.whatif.schedules.extra_work import is_as_recorded, leave_out
from perfscope.analyzers.whatif.schedules.ops import Collective, RankOp, ScheduleOp
from perfscope.analyzers.whatif.schedules.steps import StepOps, every_step
from perfscope.analyzers.whatif.sharding_on import shard
from perfscope.analyzers.whatif.sharding_plan import deepspeed_bucket
from perfscope.analyzers.whatif.sharding_recorded import (
    compute_more,
    optimizer_ns,
    phases,
    reductions_by_step,
)

_DDP_BUCKET: Final = 25 << 20
"""Default ``bucket_cap_mb`` of DistributedDataParallel, in bytes."""
_FEW: Final = 3
"""With fewer reductions per step it is not known when those of other sizes would be issued."""


def _stage(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    """From stage 3 to a lower one: parameters are gathered once, after the optimizer, or never. Up: ``sharding_on``."""
    if value not in ("0", "1", "2", "3"):
        raise BadSetting(f"{name}={value}: write 0, 1, 2 or 3")
    reductions = reductions_by_step(schedules)
    gathers = find_gathers(schedules, context, reductions)
    stage, new = recorded_stage(context, gathers, reductions), int(value)
    if new == stage:
        return Uncertainty(0.0, 0.0)
    if new > stage:
        return shard(schedules, context, name, (stage, new), gathers, reductions)
    if stage < 3:
        raise CannotReplay(
            f"{name}: parameters are gathered only once per step: the job is at stage 1 or 2, and what it reduces does "
            "not show what lower stages would reduce"
        )
    if new == 2 and _is_fsdp(context):
        # ``SHARD_GRAD_OP``: gathered for the forward as before.
        return _keep_gathered(schedules, context, gathers, reductions)
    if not reductions:
        raise CannotReplay("the collectives' sizes are not recorded; record with shapes")
    without_limit(schedules, gathers)
    schedules.without({rank_op for rank_ops in gathers.by_step.values() for rank_op in rank_ops})
    missed = 0.0
    if new == 0:
        missed = _grow_optimizer(schedules, context, reductions) / 2
    else:
        _gather_once(schedules, context, gathers)
    if new < 2:
        _reduce_all(schedules, context)
        # Stage 1 of DeepSpeed holds whole gradients and reduces them once the last of them is there.
        _move_reductions(schedules, together=math.inf if new == 1 and not _is_fsdp(context) else _DDP_BUCKET)
    if new == 0 and max(map(len, reductions.values()), default=0) < _FEW:
        # So few show the end of the backward, but not when smaller buckets would have been full.
        missed += max(rank_op.transfer_ns for rank_ops in reductions.values() for rank_op in rank_ops)
    # On CPUs what is sent beside the backward then takes cores from it.
    return Uncertainty(less=0.30 if context.on_devices else 0.45, more=0.15, either_ns=missed)


def _gather_once(schedules: EditableSchedules, context: Context, gathers: Gathers) -> None:
    """One gather of all parameters at the end of every step; the next one's first own work waits for it.

    FSDP gathers unit by unit, as recorded; others gather buckets as large as DeepSpeed's are by default.
    """
    passes = [gathers.once(rank, step) for rank, step in gathers.by_step]
    every = list(chain.from_iterable(passes))
    size = float(np.median([sum(rank_op.bytes for rank_op in once) for once in passes]))
    if not size:
        raise CannotReplay("the collectives' sizes are not recorded; record with shapes")
    piece = deepspeed_bucket(context, every[0].collective.dtype, "allgather_bucket_size")
    if _is_fsdp(context):
        piece = float(np.median([rank_op.bytes for rank_op in every]))
    pieces = max(1, round(size / piece))
    size = round(size / pieces)
    collectives: dict[tuple[int, int, int], Collective] = {}
    models = {rank_op.rank: rank_op for rank_op in reversed(every)}
    for step_ops in every_step(schedules, whole=True):
        model, step = models.get(step_ops.rank), step_ops.step
        if model is None:
            continue
        like, at = model.collective, step_ops.ends_ns - 1  # right before the next step begins
        new = []
        for number in range(pieces):
            gather = Collective("all_gather", like.group, size, like.size, step, like.dtype)
            gather = collectives.setdefault((step, gather.group, number), gather)
            new.append(RankOp(step_ops.rank, gather, model.lane, 0.0, context.transfer_ns(model, size)))
        kinds = (OpKind.ISSUE, OpKind.WAIT)
        step_ops.replace(frozenset(), [(at, ScheduleOp.of(kind, one, step)) for kind in kinds for one in new])


def _is_fsdp(context: Context) -> bool:
    return any("fsdp" in partial.strategies for partial in context.result.partials.values())


def _move_reductions(schedules: EditableSchedules, together: float) -> None:
    """Reductions are issued ``together`` bytes at a time, and nothing waits before all of them are."""
    for step_ops in every_step(schedules):
        issues = step_ops.issues("reduce_scatter")
        if not issues:
            continue
        mine = set(issues.values())
        at = [float(at) for at in step_ops.progress_ns]
        last = max(issues)
        moved: list[tuple[float, ScheduleOp]] = []
        pending: list[ScheduleOp] = []
        held = 0
        for place, rank_op in issues.items():
            pending.append(step_ops.ops[place])
            held += rank_op.bytes
            if held >= together or place == last:
                moved += [(at[place], each) for each in pending]
                pending, held = [], 0
        moved += [(max(at[place], at[last]), step_ops.ops[place]) for place in step_ops.places(OpKind.WAIT, mine)]
        step_ops.replace(frozenset(mine), moved)


def _grow_optimizer(schedules: EditableSchedules, context: Context, reductions: StepCollectives) -> float:
    """Each rank updates all parameters, not its share of them; returns by how much that lengthens a step, ns."""
    total = 0.0
    for (rank, step), rank_ops in reductions.items():
        when = phases(context, StepOps(schedules, rank, step, whole=True), rank_ops)
        grown = optimizer_ns(context, rank, step) * (rank_ops[0].collective.size - 1)
        compute_more(schedules.ops[rank], step, when, grown)
        total += grown
    return total / max(len(reductions), 1)


def _reduce_all(schedules: EditableSchedules, context: Context) -> None:
    """Reduce-scatters become all-reduces, which move twice the bytes. Gloo carries a reduce-scatter out as an
    all-reduce: there the recorded transfer is that of one already.
    """
    times = 1 if any(run.backend == "gloo" for run in context.runs.values()) else 2
    for rank_op in schedules.issued():
        if rank_op.moves("reduce_scatter"):
            rank_op.transfer_ns = context.transfer_ns(rank_op, times * rank_op.bytes)


def _reshard(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    """``SHARD_GRAD_OP``."""
    if flag(name, value):
        raise CannotReplay(f"{name}=true: the recording does not show how long the additional gathers would take")
    reductions = reductions_by_step(schedules)
    gathers = find_gathers(schedules, context, reductions)
    if not gathers.twice:
        raise CannotReplay(f"{name}: parameters are not gathered twice per step")
    return _keep_gathered(schedules, context, gathers, reductions)


def _keep_gathered(
    schedules: EditableSchedules, context: Context, gathers: Gathers, reductions: StepCollectives
) -> Uncertainty:
    """Parameters gathered for the forward stay for the backward: its gathers go. FSDP1 frees them only in a backward
    that reduces gradients, so that under ``no_sync`` those of later micro-batches go, too. FSDP2's copies go with them.
    """
    dropped: set[RankOp] = set()
    for key, passes in gathers.passes.items():
        stay = key in gathers.reduced_once and _is_fsdp1(context)
        for each in passes:
            if each.backward or (stay and each.microbatch):
                dropped.update(each.gathers)
    for rank in schedules.ops:
        if is_as_recorded(schedules, rank):
            leave_out(schedules, context.result, rank, context.result.partials[rank].gather_copies)
    without_gathers(schedules, gathers, dropped, reductions)
    return Uncertainty(less=0.20, more=0.10)


def _is_fsdp1(context: Context) -> bool:
    """By the settings, else by the names of the ranges that either version records."""
    for run in context.runs.values():
        if "fsdp" in run.settings:
            return bool(run.settings["fsdp"].get("version") == 1)
    names = (name for partial in context.result.partials.values() for name in partial.tables.modules.names)
    return fsdp_by_ranges(names) == 1


def _overlap_reductions(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    """Reductions run beside the backward; only what follows the last of them waits for all."""
    if not flag(name, value):
        raise CannotReplay(f"{name}=false: the recording does not show what would wait for each reduction")
    moved = False
    for step_ops in list(every_step(schedules)):
        issues = step_ops.issues("reduce_scatter", "all_reduce")
        if not issues:
            continue
        last = max(issues)
        waits = [place for place in step_ops.places(OpKind.WAIT, set(issues.values())) if place < last]
        step_ops.move(dict.fromkeys(waits, last))
        moved |= bool(waits)
    keep_host_pace(schedules, context)
    if not moved:
        raise CannotReplay(f"{name}: nothing waits for a reduction before the last of them has been issued")
    return Uncertainty(less=0.30, more=0.05)


SETTINGS = (
    Setting(
        "zero.stage", "0|1|2|3", "shard parameters, gradients and optimizer more, or less", _stage, 1, with_hosts=True
    ),
    Setting(
        "fsdp.reshard_after_forward", "false", "keep gathered parameters for the backward", _reshard, 1, with_hosts=True
    ),
    Setting(
        "zero.overlap_comm",
        "true",
        "reduce gradients while the backward computes",
        _overlap_reductions,
        1,
        with_hosts=True,
    ),
)
