"""Gradients that a loop of the user's reduces after the backward: all at once, or by DistributedDataParallel.

``for p in model.parameters(): dist.all_reduce(p.grad)`` pays the latency of every all-reduce, and overlaps none with
the backward; so does a loop that reduces each to one rank and broadcasts it back. ``flat`` replays one all-reduce of
all gradients where the loop began; ``ddp`` replays the buckets that DistributedDataParallel would fill while the
backward goes on (``bucketing``), and waits for them where the loop began.

The loop's kernels (averages) stay: DDP copies and averages as much. Into one tensor and back out of it all gradients
are copied twice more, at the pace of those kernels. The loop's launches and Python go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Final

import numpy as np

from perfscope.analyzers.rank.host_lane import HostTime
from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.whatif.bucketing import FIRST_BUCKET, MIB, bucket_bytes, bucket_ends
from perfscope.analyzers.whatif.change import BadSetting, CannotReplay, Context, Setting, Uncertainty
from perfscope.analyzers.whatif.ddp import BACKWARD_SHARE, alone_share
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.analyzers.whatif.schedules.ops import Collective, RankOp, ScheduleOp
from perfscope.analyzers.whatif.schedules.steps import StepOps, every_step
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Float64

MANY: Final = 8
"""All-reduces of a step below which no loop over the parameters is at work."""
_LARGE: Final = FIRST_BUCKET
"""Bytes from which fewer are gradients, too, where they are all of the step's: several in one tensor each."""
_CAP: Final = 25 * MIB
"""DistributedDataParallel's default bucket."""
_BETWEEN: Final = 0.05
"""Share of a step's compute between two all-reduces that ends the loop."""
_INSIDE: Final = 0.25
"""Share of a step's compute that a loop's own kernels take at most; a backward takes more."""
_BEFORE: Final = 0.5
"""Least share of a step's compute before the loop: the forward and the backward."""
_BACK: Final = "broadcast"
_SCALARS: Final = 8
"""Bytes up to which an all-reduce is of no gradient."""
_FLAT_PASSES: Final = 3.0
"""Into the one tensor, averaged, and back: as often all gradients are read and written, which a loop does once."""
_UNSURE: Final = 0.3
"""Share of the loop's launches and Python, and of the copies, that may be more or less."""


@dataclass(frozen=True, eq=False)
class _Loop:
    """The loop of one rank in one step: its all-reduces, or reductions to one rank and broadcasts, in order, and the
    places of its ops in the step's.
    """

    rank: int
    step: int
    reduced: tuple[RankOp, ...]
    first: int
    last: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each gradient."""
        return tuple(one.bytes for one in self.reduced if one.collective.kind != _BACK)

    @property
    def kinds(self) -> list[list[RankOp]]:
        """Its collectives by kind."""
        return list(grouped((one.collective.kind, one) for one in self.reduced).values())

    def transfers_ns(self, context: Context, sizes: Sequence[int]) -> list[float]:
        """Of all-reduces of these sizes. Where gradients are reduced to one rank and broadcast back, that is what both
        take; on devices rings send less, to each rank its part once less.
        """
        both = [context.transfers_among_ns(same, sizes) for same in self.kinds]
        ranks = self.reduced[0].collective.size
        share = (ranks - 1) / ranks if len(both) > 1 and context.on_devices else 1.0
        return [share * sum(each) for each in zip(*both, strict=True)]


def _reduce(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    if value not in ("flat", "ddp"):
        raise BadSetting(f"{name}={value}: write flat or ddp")
    loops = _loops(schedules)
    if not loops:
        raise CannotReplay(f"{name}: no loop of all-reduces after the backward is recorded with its sizes")
    if any(not one.collective.whole for loop in loops for one in loop.reduced):
        raise CannotReplay(
            f"{name}: some ranks are not recorded, so their arrival at other all-reduces is not known; record all ranks"
        )
    if len({loop.sizes for loop in loops}) > 1:
        raise CannotReplay(f"{name}: the recorded steps or ranks reduce different gradients")
    sizes = loops[0].sizes
    total = float(sum(sizes))
    # Few large tensors hold several gradients each, whose sizes are not known.
    parameters = sizes[::-1] if len(sizes) >= MANY else None
    # Gradients become ready from the last parameter to the first.
    ends = [total] if value == "flat" else bucket_ends(total, FIRST_BUCKET, _CAP, parameters)
    first = loops[0].reduced[0].collective
    alone = 1.0 if first.returned else alone_share(context, first.group)
    collectives: dict[tuple[int, int, int], Collective] = {}
    # A host that no loop delays launches the rest earlier.
    waited_ns = 0.0 if schedules.hosts else float(np.mean([_launching(schedules, loop) for loop in loops]))
    kept = [_only_kernels(schedules, loop, value) for loop in loops]
    for loop in loops:
        _replace(schedules, context, loop, ends, collectives, alone)
    # A wait may have ended in the next step only.
    schedules.without({one for loop in loops for one in loop.reduced})
    buckets = bucket_bytes(ends)
    transfers = alone * sum(loops[0].transfers_ns(context, buckets))
    transfer_error = max(context.transfer_error(same, buckets) for same in loops[0].kinds)
    either = transfer_error * transfers + _UNSURE * float(np.mean([dropped + more for dropped, more in kept]))
    # It does not show when the gradients became ready.
    less, more = (0.50, 0.25) if value == "ddp" else (0.15, 0.15)
    return Uncertainty(less, more, either, faster_ns=waited_ns)


def _loops(schedules: EditableSchedules) -> list[_Loop]:
    """Every rank's loop of every step that the recording holds whole; empty where one has none."""
    group = next((own[0].collective.group for own in schedules.of_gradients("all_reduce").values()), None)
    used = set(schedules.recorded.steps[schedules.recorded.used].tolist())
    loops = []
    for step_ops in every_step(schedules):
        found = _loop_of(step_ops, group) if group is not None else _returning(step_ops)
        if found is not None:
            loops.append(found)
        elif step_ops.step in used:
            return []
    return loops


def _loop_of(step_ops: StepOps, group: int | None) -> _Loop | None:
    """The all-reduces of a step that follow its last backward. Where that is not recorded, the longest row of them with
    little compute in it, after most of the step's compute.
    """
    places = {
        place: own
        for place, op in enumerate(step_ops.ops)
        if (own := op.issued) is not None
        and own.collective.kind == "all_reduce"
        and own.collective.group == group
        and own.bytes
    }
    row = _without_scalars({place: own for place, own in places.items() if own.after_backward})
    return _the_loop(step_ops, row, places) or _late_row(step_ops, places)


def _returning(step_ops: StepOps) -> _Loop | None:
    """The reductions of a step's gradients to one rank, and the broadcasts back."""
    row = {place: own for place, op in enumerate(step_ops.ops) if (own := op.issued) and own.collective.returned}
    return _the_loop(step_ops, row, row)


def _without_scalars(row: dict[int, RankOp]) -> dict[int, RankOp]:
    """Without one or two numbers (a norm, a loss) that are reduced before or after the gradients."""
    large = [index for index, own in enumerate(row.values()) if own.bytes > _SCALARS]
    return dict(list(row.items())[large[0] : large[-1] + 1]) if large else {}


def _late_row(step_ops: StepOps, places: dict[int, RankOp]) -> _Loop | None:
    if not places:
        return None
    compute = np.cumsum([op.own_ns[TimeCategory.COMPUTE] for op in step_ops.ops])
    whole = float(compute[-1])
    apart = np.flatnonzero(np.diff(compute[list(places)]) > _BETWEEN * whole)
    row = max(np.split(np.array(list(places)), apart + 1), key=len).tolist()
    loop = _the_loop(step_ops, {place: places[place] for place in row}, places)
    if loop is None:
        return None
    before, inside = float(compute[loop.first]), float(compute[loop.last] - compute[loop.first])
    return None if inside > _INSIDE * whole or before < _BEFORE * whole else loop


def _the_loop(step_ops: StepOps, row: dict[int, RankOp], places: dict[int, RankOp]) -> _Loop | None:
    """The loop of these all-reduces (by their places), with the waits for them; None where they are few of the step's
    ``places``, or small.
    """
    are_all = row.keys() == _without_scalars(places).keys()
    if len(row) < MANY and not (are_all and min((own.bytes for own in row.values()), default=0) >= _LARGE):
        return None
    last = max([max(row), *step_ops.places(OpKind.WAIT, set(row.values()))])
    return _Loop(step_ops.rank, step_ops.step, tuple(row.values()), min(row), last)


def _launching(schedules: EditableSchedules, loop: _Loop) -> float:
    """Own time of a step before its loop in which the device waited for launches, ns."""
    ops = StepOps(schedules, loop.rank, loop.step).ops
    return sum(float(op.own_ns[TimeCategory.LAUNCH]) for op in ops[: loop.first + 1])


def _replace(
    schedules: EditableSchedules,
    context: Context,
    loop: _Loop,
    ends: Sequence[float],
    collectives: dict[tuple[int, int, int], Collective],
    alone: float,
) -> None:
    """Put all-reduces up to ``ends`` (bytes reduced once each is done) in the loop's place."""
    step_ops = StepOps(schedules, loop.rank, loop.step)
    begin = float(step_ops.progress_ns[loop.first])
    model = loop.reduced[0]
    added: list[tuple[float, ScheduleOp]] = []
    made = []
    # Of several micro-batches only the last one's backward reduces.
    backward = BACKWARD_SHARE / context.result.partials[loop.rank].microbatches(loop.step)
    sizes = bucket_bytes(ends)
    transfers = loop.transfers_ns(context, sizes)
    # What delayed one recorded all-reduce does not delay each of the new ones.
    gap_ns = median(one.gap_ns for one in loop.reduced)
    for index, (size, at) in enumerate(zip(sizes, _ready(step_ops, loop.first, ends, backward), strict=True)):
        new = replace(model.collective, kind="all_reduce", returned=False, bytes=size)
        collective = collectives.setdefault((loop.step, new.group, index), new)
        made.append(RankOp(loop.rank, collective, model.lane, gap_ns, alone * transfers[index]))
        added.append((min(at, begin), ScheduleOp.of(OpKind.ISSUE, made[-1], loop.step)))
    added += [(begin, ScheduleOp.of(OpKind.WAIT, own, loop.step)) for own in made]
    step_ops.replace(frozenset(loop.reduced), added)


def _only_kernels(schedules: EditableSchedules, loop: _Loop, value: str) -> tuple[float, float]:
    """Leave of the own time inside the loop its compute, as often as the ``value`` goes over the gradients, and of its
    host's the launches of that; (ns taken out, ns added).
    """
    ops = StepOps(schedules, loop.rank, loop.step).ops[loop.first + 1 : loop.last + 1]
    times, launches = (_FLAT_PASSES, _FLAT_PASSES / len(loop.reduced)) if value == "flat" else (1.0, 1.0)
    launching = sum(float(op.host.own_ns[HostTime.OPERATORS]) for op in ops if op.host is not None)
    issuing = sum(schedules.issuing_ns(op) for op in ops if op.issued in loop.reduced)
    launches *= max(1 - issuing / launching, 0.0) if launching else 0.0
    dropped = added = 0.0
    for op in ops:
        compute = float(op.own_ns[TimeCategory.COMPUTE])
        dropped += float(op.own_ns.sum()) - compute
        added += (times - 1) * compute
        op.own_ns = np.zeros(len(TimeCategory))
        op.own_ns[TimeCategory.COMPUTE] = times * compute
        if op.host is not None:
            op.host.scale_rows([row for row in HostTime if row is not HostTime.OPERATORS], 0.0)
            op.host.scale_rows([HostTime.OPERATORS], launches)
    for one in loop.reduced:
        one.host_ns = 0.0
    return dropped, added


def _ready(step_ops: StepOps, first: int, ends: Sequence[float], backward: float) -> list[float]:
    """Own progress at which each of ``ends`` bytes of gradients are there: evenly over the last ``backward``, the last
    share of the compute before the loop.
    """
    compute: Float64 = np.cumsum([op.own_ns[TimeCategory.COMPUTE] for op in step_ops.ops[: first + 1]])
    share = np.array(ends) / ends[-1]
    wanted = compute[-1] * (1 - backward * (1 - share))
    progress = np.concatenate(([0.0], step_ops.progress_ns[: first + 1]))
    moments: list[float] = np.interp(wanted, np.concatenate(([0.0], compute)), progress).tolist()
    return moments


SETTINGS = (
    Setting(
        "gradients.reduce",
        "flat|ddp",
        "gradients reduced by a loop: in one all-reduce, or by DDP",
        _reduce,
        1,
        with_hosts=True,
        of_host_work=True,
    ),
)
