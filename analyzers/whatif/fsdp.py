"""FSDP's own settings: gradients reduced once per step, and parameters gathered while an earlier unit computes.

FSDP scatters a unit's gradients after each of its backwards. With ``set_requires_gradient_sync(False)`` (FSDP2), or
under ``no_sync`` (FSDP1), it adds them up whole and scatters the sums after the last micro-batch. Parameters are
gathered and freed as before. Adding takes what copying for the reduction took, and reads the sum besides.

``fsdp.reduce_dtype`` sends the same gradients in 16 bits, as with ``MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)``
(FSDP2) or ``MixedPrecision`` (FSDP1); with hybrid sharding the sums across replicas, too.

``fsdp.prefetch`` moves the gathers of all passes; ``fsdp.backward_prefetch`` those of backwards alone, as FSDP1's
argument of that name does: there the next unit's gather comes before a unit computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, takewhile
from typing import Final

import numpy as np

from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.whatif.change import (
    MEMORY_GBPS,
    REDUCED_ONCE,
    BadSetting,
    CannotReplay,
    Context,
    Setting,
    Uncertainty,
    flag,
    keep_host_pace,
)
from perfscope.analyzers.whatif.gather_limit import Pass, forget_unfreed, limits, taken_later, wait_for_earlier
from perfscope.analyzers.whatif.gathers import GatherPass, Gathers, find_gathers, of_unknown_size
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules, StepCollectives
from perfscope.analyzers.whatif.schedules.ops import Collective, RankOp
from perfscope.analyzers.whatif.schedules.steps import StepOps, every_step
from perfscope.analyzers.whatif.sharding_recorded import reductions_by_step
from perfscope.grouping import grouped
from perfscope.results.categories import TimeCategory

_MOST_AHEAD: Final = 4
_AT_ONCE: Final = 0.1
"""Share of a unit's work below which nothing is computed between two gathers."""
_BACKWARD_PRE: Final = "BACKWARD_PRE"
_WIDE: Final = "float32"


def _fsdp_no_sync(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    """Scatter the sums of a step's gradients once, after the last micro-batch's backward."""
    if not flag(name, value):
        raise CannotReplay(f"{name}=false: the recording does not show how long the additional reductions would take")
    context.refuse_cleared(name)
    scatters, reduced = _reductions(schedules, name)
    dropped: set[RankOp] = set()
    for (rank, step), mine in scatters.items():
        microbatches = context.result.partials[rank].microbatches(step)
        step_ops = StepOps(schedules, rank, step)
        dropped.update(step_ops.before_last(mine, microbatches))
        for between in _between_replicas(mine, reduced.get((rank, step), ())):
            dropped.update(step_ops.before_last(between, microbatches))
    if not dropped:
        raise CannotReplay(f"{name}: {REDUCED_ONCE}")
    if context.on_devices:
        _add_up(schedules, {rank_op for rank_op in dropped if rank_op.moves("reduce_scatter")})
    schedules.without(dropped)
    return Uncertainty(less=0.25, more=0.15)


def _reduce_dtype(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    """Half the bytes of fp32 gradients."""
    if value not in ("bf16", "fp16"):
        raise BadSetting(f"{name}={value}: write bf16 or fp16")
    scatters, reduced = _reductions(schedules, name)
    sent = [
        rank_op
        for key, mine in scatters.items()
        for rank_op in chain(mine, *_between_replicas(mine, reduced.get(key, ())))
    ]
    halved = [rank_op for rank_op in sent if rank_op.collective.dtype == _WIDE]
    if not halved:
        raise CannotReplay(f"{name}: gradients are reduced in 16 bits already, or their type is not recorded")
    for rank_op in halved:
        rank_op.transfer_ns = context.part_of_transfer_ns(rank_op, 0.5)
    keep_host_pace(schedules, context)
    return Uncertainty(less=0.15, more=0.10)


def _reductions(schedules: EditableSchedules, name: str) -> tuple[StepCollectives, StepCollectives]:
    """(reduce-scatters of FSDP's gradients, all all-reduces); those of unknown size where none has a size. Raises
    CannotReplay where there are none.
    """
    scatters = schedules.of_gradients("reduce_scatter") or _of_lone_group(of_unknown_size(schedules, "reduce_scatter"))
    if not scatters:
        raise CannotReplay(f"{name}: no reductions of FSDP's gradients are recorded")
    return scatters, schedules.by_step("all_reduce") or of_unknown_size(schedules, "all_reduce")


def _between_replicas(scatters: Sequence[RankOp], reduced: Sequence[RankOp]) -> list[list[RankOp]]:
    """By group: the all-reduces of a step that sum shards across replicas (HYBRID_SHARD), as many as it scatters."""
    by_group = grouped((each.collective.group, each) for each in reduced)
    return [mine for mine in by_group.values() if len(mine) == len(scatters)]


def _of_lone_group(scatters: StepCollectives) -> StepCollectives:
    """Those of ranks that scatter in one group: in several, without sizes, some may be of activations."""
    groups = grouped((rank, own.collective.group) for (rank, _), mine in scatters.items() for own in mine)
    return {key: mine for key, mine in scatters.items() if len(set(groups[key[0]])) == 1}


def _add_up(schedules: EditableSchedules, dropped: set[RankOp]) -> None:
    """Where each of the scatters was issued, read the sum of the gradients so far: as many bytes as it moved, where
    that is recorded.
    """
    for op in chain.from_iterable(schedules.ops.values()):
        if op.kind is OpKind.ISSUE and op.rank_op in dropped:
            op.add(TimeCategory.COMPUTE, op.rank_op.bytes / MEMORY_GBPS)


def _prefetch(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    """Every gather is issued, where it is not yet, before the unit ``value`` before its own computes."""
    ahead = int(value) if value.isdecimal() else 0
    if not 1 <= ahead <= _MOST_AHEAD:
        raise BadSetting(f"{name}={value}: write how many gathers earlier, 1 to {_MOST_AHEAD}")
    return _issue_ahead(
        schedules, context, name, find_gathers(schedules, context, reductions_by_step(schedules)), ahead
    )


def _prefetch_backward(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    """The same of those of backwards, by one."""
    if value != _BACKWARD_PRE:
        raise BadSetting(f"{name}={value}: write {_BACKWARD_PRE}")
    gathers = find_gathers(schedules, context, reductions_by_step(schedules))
    return _issue_ahead(schedules, context, name, gathers, 1, backward=True)


def _issue_ahead(
    schedules: EditableSchedules, context: Context, name: str, gathers: Gathers, ahead: int, *, backward: bool = False
) -> Uncertainty:
    """Gathers are issued before the unit ``ahead`` before their own computes; ``backward``: only those of backwards.

    The backward's first is not: while the forward computes, FSDP does not know that the backward comes next; where the
    last unit stayed, its backward comes before that gather. FSDP's limit makes the host wait where it then gathers, for
    units that were freed as much earlier as more of them are gathered.
    """
    chosen = {
        key: [each for each in _with_stayed(passes) if each.backward >= backward]
        for key, passes in gathers.passes.items()
    }
    if all(len(each.gathers) < 2 for passes in chosen.values() for each in passes):
        raise CannotReplay(f"{name}: no gathers of parameters follow one another in a recorded step")
    passed: dict[Collective, int] = {}
    for step_ops in every_step(schedules):
        for each in chosen.get((step_ops.rank, step_ops.step), ()):
            others = dict.fromkeys((gather.collective for gather in each.gathers), 0)
            behind = _issued_ahead(step_ops, each.gathers, ahead).items()
            others |= {
                collective: len(places) for collective, places in (_passes_by(step_ops, *move) for move in behind)
            }
            for collective, count in others.items():
                passed[collective] = min(passed.get(collective, count), count)
    _limit_earlier(schedules, gathers, ahead, backward=backward)
    for step_ops in list(every_step(schedules)):
        moved: dict[int, int] = {}
        held = limits(step_ops.ops)
        for each in chosen.get((step_ops.rank, step_ops.step), ()):
            moved |= _alike(step_ops, _issued_ahead(step_ops, each.gathers, ahead), passed)
        for place, target in moved.items():
            # As long after the rank came there; when a wait ends, it is there.
            other = step_ops.ops[target]
            step_ops.ops[place].lag_ns = other.lag_ns if other.kind is OpKind.ISSUE else 0.0
        issued = {step_ops.ops[place].issued: target for place, target in moved.items()}
        step_ops.move(moved | {held[each]: target for each, target in issued.items() if each in held})
    for ops in schedules.ops.values():
        forget_unfreed(ops)
    keep_host_pace(schedules, context)
    return Uncertainty(less=0.30, more=0.10)


def _with_stayed(passes: Sequence[GatherPass]) -> list[GatherPass]:
    """The passes, those of backwards with the forward's last gather, where that unit stayed and is gathered once."""
    found: list[GatherPass] = []
    forward: GatherPass | None = None
    for each in passes:
        stayed = each.backward and forward is not None and len(each.gathers) < len(forward.gathers)
        found.append(replace(each, gathers=(forward.gathers[-1], *each.gathers)) if stayed and forward else each)
        forward = None if each.backward else each
    return found


def _limit_earlier(schedules: EditableSchedules, gathers: Gathers, ahead: int, *, backward: bool) -> None:
    """Hosts wait for units freed earlier, where more are gathered before their own is used."""
    fewer: dict[int, dict[int | None, int]] = {rank: {} for rank in schedules.ops}
    for step_ops in every_step(schedules):
        passes = gathers.passes.get((step_ops.rank, step_ops.step), ())
        issues = {op.issued: place for place, op in enumerate(step_ops.ops) if op.issued is not None}
        known = [_ahead_already(step_ops, [issues[gather] for gather in each.gathers]) for each in passes]
        frees = [each.backward or gathers.twice for each in passes]
        fewer[step_ops.rank][step_ops.step] = taken_later(
            [_pass(*of) for of in zip(passes, known, frees, strict=True)],
            [
                _pass(each, max(before, ahead) if each.backward >= backward else before, free)
                for each, before, free in zip(passes, known, frees, strict=True)
            ],
        )
    for rank, ops in schedules.ops.items():
        mine = [gather for (of, _), rank_ops in sorted(gathers.by_step.items()) if of == rank for gather in rank_ops]
        wait_for_earlier(ops, mine, fewer[rank])


def _pass(each: GatherPass, ahead: int, free: bool) -> Pass:
    return Pass(len(each.gathers), ahead, free)


def _issued_ahead(step_ops: StepOps, gathers: Sequence[RankOp], ahead: int) -> dict[int, int]:
    """Place of the issue of each gather of a pass that comes too late -> behind what it is issued instead: where the
    unit ``ahead`` before its own begins to compute. Earlier no memory is free: more units would be held.
    """
    issues = {op.issued: place for place, op in enumerate(step_ops.ops) if op.issued is not None}
    waits = {op.rank_op: place for place, op in enumerate(step_ops.ops) if op.kind is OpKind.WAIT}
    already = _ahead_already(step_ops, [issues[gather] for gather in gathers])
    behind, needed = {}, -1
    for number, rank_op in enumerate(gathers[1:], 1):
        begins = max(number - ahead, 0)
        # Units are needed in order, whether or not the rank had to wait for them.
        needed = max(needed, waits.get(gathers[begins], -1))
        target = max(needed, issues[gathers[min(begins + already, number)]])
        if target < issues[rank_op]:
            behind[issues[rank_op]] = target
    return behind


def _ahead_already(step_ops: StepOps, issues: Sequence[int]) -> int:
    """How many gathers ahead of its unit those of a pass are issued: behind the last of them as many more units are
    reduced; where none is, nothing is computed before as many more are issued.
    """
    later = step_ops.issues("all_gather", "reduce_scatter", "all_reduce")
    reduced = list(
        takewhile(lambda op: op.collective.kind != "all_gather", (later[at] for at in later if at > issues[-1]))
    )
    if reduced:
        return len(reduced) - 1
    worked = np.diff(step_ops.progress_ns[list(issues)])
    return sum(1 for _ in takewhile(lambda ns: ns <= _AT_ONCE * worked.max(), worked)) if len(worked) > 1 else 0


def _passes_by(step_ops: StepOps, place: int, target: int) -> tuple[Collective, list[int]]:
    """(the gather issued at ``place``; places of the other kinds that it comes before on its stream once it is issued
    behind ``target``).
    """
    gather = step_ops.ops[place].issued
    assert gather is not None
    between = ((at, step_ops.ops[at].issued) for at in range(target + 1, place))
    return gather.collective, [
        at
        for at, other in between
        if other is not None and other.lane == gather.lane and other.collective.kind != gather.collective.kind
    ]


def _alike(step_ops: StepOps, behind: Mapping[int, int], passed: Mapping[Collective, int]) -> dict[int, int]:
    """``behind`` with every gather no further ahead of others than on all ranks (``passed``): communicators need one
    order everywhere, or ranks would wait for each other.
    """
    moved, last = {}, -1
    for place, target in sorted(behind.items()):
        collective, others = _passes_by(step_ops, place, target)
        kept = len(others) - passed[collective]
        last = max(last, others[kept - 1] if kept else target)
        moved[place] = last
    return moved


SETTINGS = (
    Setting(
        "fsdp.no_sync",
        "true",
        "reduce FSDP's gradients after the last micro-batch only",
        _fsdp_no_sync,
        1,
        with_hosts=True,
    ),
    Setting("fsdp.reduce_dtype", "bf16|fp16", "reduce FSDP's gradients in 16 bits", _reduce_dtype, 1, with_hosts=True),
    Setting("fsdp.prefetch", "N", "issue every gather of parameters N gathers earlier", _prefetch, 1, with_hosts=True),
    Setting(
        "fsdp.backward_prefetch",
        _BACKWARD_PRE,
        "issue the gathers of backwards one gather earlier",
        _prefetch_backward,
        1,
        with_hosts=True,
    ),
)
