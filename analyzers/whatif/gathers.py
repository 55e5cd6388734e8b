"""The gathers of parameters of a step: which pass of which micro-batch each belongs to.

FSDP and ZeRO-3 gather every unit before its forward and, unless it stayed, again before its backward, in each
micro-batch. Who issued a gather shows its pass: autograd, or the training loop. Where autograd's functions are not
recorded, elements decide whether there is a second pass: gathered elements over those of the model or of the
gradients. Types may differ (bf16 gathers of fp32 parameters, gradients reduced in fp32), so bytes do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final

from perfscope.analyzers.rank.collectives.collectives import SMALLEST
from perfscope.analyzers.rank.collectives.communication import DTYPE_BYTES
from perfscope.analyzers.whatif.change import Context
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules, StepCollectives
from perfscope.analyzers.whatif.schedules.ops import RankOp
from perfscope.frozen import dataclass
from perfscope.grouping import grouped

_TWICE: Final = 1.5
"""Elements gathered per micro-batch over the model's, from which parameters are gathered twice."""


@dataclass(frozen=True)
class GatherPass:
    """What is gathered, in order, for one forward or one backward; ``microbatch`` counts from 0 in the step."""

    backward: bool
    microbatch: int
    gathers: tuple[RankOp, ...]


@dataclass(frozen=True)
class Gathers:
    """The gathers of parameters, rank by rank and step by step."""

    by_step: StepCollectives
    passes: dict[tuple[int, int], tuple[GatherPass, ...]]
    reduced_once: frozenset[tuple[int, int]]
    """Steps of ranks that reduce gradients in the last micro-batch only."""

    @property
    def twice(self) -> bool:
        """Are parameters gathered for the forward and again for the backward (stage 3)?"""
        return any(each.backward for passes in self.passes.values() for each in passes)

    def once(self, rank: int, step: int) -> tuple[RankOp, ...]:
        """Those of the first pass of a step: every unit once, in the order of the forward."""
        passes = self.passes.get((rank, step), ())
        return passes[0].gathers if passes else ()


def find_gathers(schedules: EditableSchedules, context: Context, reductions: StepCollectives) -> Gathers:
    """The gathers of the group that ``reductions`` of gradients use, else of the busiest, those of unknown size too."""
    every = grouped(
        ((rank_op.rank, step), rank_op)
        for rank_op in schedules.issued()
        if (step := rank_op.collective.step) in schedules.steps and _gathers_parameters(rank_op)
    )
    by_step = _of_group(every, reductions)
    sized = reductions or of_unknown_size(schedules, "reduce_scatter", "all_reduce")
    both = [rank_op for steps in (by_step, sized) for rank_ops in steps.values() for rank_op in rank_ops]
    known = any(rank_op.backward for rank_op in both)
    place = {rank_op: number for number, rank_op in enumerate(schedules.issued())}
    twice = not known and bool(by_step) and _twice_by_elements(context, by_step, reductions, place)
    passes = {}
    for (rank, step), mine in by_step.items():
        count = context.result.partials[rank].microbatches(step)
        passes[rank, step] = tuple(_as_issued(mine, count) if known else _evenly(mine, count, twice=twice))
    once = {key for key, of_step in passes.items() if _after_forwards(of_step, sized.get(key, ()), place)}
    return Gathers(by_step, passes, frozenset(once))


def recorded_stage(context: Context, gathers: Gathers, reductions: StepCollectives) -> int:
    """The ZeRO stage that the job runs at (``SHARD_GRAD_OP`` is 2, ``FULL_SHARD`` 3)."""
    strategies = {name for run in context.runs.values() for name in run.strategies}
    if not gathers.by_step:
        return 1 if "zero1" in strategies else 0
    # DeepSpeed keeps what is used again soon (stage3_max_reuse_distance): all of a small model.
    if gathers.twice or "zero3" in strategies:
        return 3
    kinds = {rank_op.collective.kind for rank_ops in reductions.values() for rank_op in rank_ops}
    # DeepSpeed's stage 2 may reduce whole buckets, too.
    return 1 if "zero1" in strategies or (kinds == {"all_reduce"} and "zero2" not in strategies) else 2


def _after_forwards(passes: Sequence[GatherPass], reductions: Sequence[RankOp], place: Mapping[RankOp, int]) -> bool:
    """Are all reductions issued after the last gather for a forward?"""
    last = max((place[each.gathers[-1]] for each in passes if not each.backward), default=0)
    return bool(reductions) and all(place[rank_op] > last for rank_op in reductions)


def of_unknown_size(schedules: EditableSchedules, *kinds: str) -> StepCollectives:
    """Collectives of these kinds whose sizes are not recorded, rank by rank and step by step."""
    return grouped(
        ((rank_op.rank, step), rank_op)
        for rank_op in schedules.issued()
        if (step := rank_op.collective.step) in schedules.steps
        and rank_op.collective.kind in kinds
        and rank_op.collective.bytes is None
    )


def _gathers_parameters(rank_op: RankOp) -> bool:
    size = rank_op.collective.bytes
    return rank_op.collective.kind == "all_gather" and (size is None or size >= SMALLEST)


def _of_group(every: StepCollectives, reductions: StepCollectives) -> StepCollectives:
    """Of each rank those in the group of its reductions, else in its busiest."""
    moved: dict[int, Counter[int]] = {}
    for (rank, _), rank_ops in every.items():
        for rank_op in rank_ops:
            moved.setdefault(rank, Counter())[rank_op.collective.group] += max(rank_op.bytes, 1)
    reducing = {(rank, own.collective.group) for (rank, _), rank_ops in reductions.items() for own in rank_ops}
    groups = {}
    for rank, by_group in moved.items():
        wanted = [group for group in by_group if (rank, group) in reducing]
        groups[rank] = max(wanted or by_group, key=by_group.__getitem__)
    chosen = {
        key: [own for own in rank_ops if own.collective.group == groups[key[0]]] for key, rank_ops in every.items()
    }
    return {key: rank_ops for key, rank_ops in chosen.items() if rank_ops}


def _as_issued(gathers: Sequence[RankOp], count: int) -> list[GatherPass]:
    """By who issued them. Forwards between which no backward gathers are as long as each other."""
    runs = [(backward, list(run)) for backward, run in groupby(gathers, key=lambda rank_op: rank_op.backward)]
    parts: list[tuple[bool, list[RankOp]]] = []
    forwards = sum(not backward for backward, _ in runs)
    for backward, run in runs:
        pieces = count if forwards == 1 and len(runs) == 1 and len(run) % count == 0 else 1
        size = len(run) // pieces
        parts += [(backward, run[at : at + size]) for at in range(0, len(run), size)]
    found: list[GatherPass] = []
    microbatch = -1
    for backward, run in parts:
        microbatch += not backward or microbatch < 0
        found.append(GatherPass(backward, microbatch, tuple(run)))
    return found


def _evenly(gathers: Sequence[RankOp], count: int, *, twice: bool) -> list[GatherPass]:
    """Every micro-batch gathers as much. The backward gathers what the forward did, except a unit that stayed."""
    size = len(gathers) // count if len(gathers) % count == 0 else len(gathers)
    found = []
    for microbatch, at in enumerate(range(0, len(gathers), size)):
        mine = tuple(gathers[at : at + size])
        turn = size - size // 2 if twice else size
        found.append(GatherPass(False, microbatch, mine[:turn]))
        if mine[turn:]:
            found.append(GatherPass(True, microbatch, mine[turn:]))
    return found


def _twice_by_elements(
    context: Context, by_step: StepCollectives, reductions: StepCollectives, place: Mapping[RankOp, int]
) -> bool:
    """Are as many elements gathered in a micro-batch as the model has twice?"""
    (rank, step), gathers = next(iter(by_step.items()))
    count = context.result.partials[rank].microbatches(step)
    model = _model_elements(context, gathers[0].collective.size)
    if model is None:
        reduced = reductions.get((rank, step), [])
        # Where gradients are reduced in every micro-batch, the first are before the last one's gathers.
        first = min((place[rank_op] for rank_op in reduced), default=0)
        each = sum(place[rank_op] < first for rank_op in gathers) <= len(gathers) * (count - 1) / count
        model = _elements(reduced) / (count if each else 1)
    # Nothing to compare with: stage 3 is what gathers most.
    return not model or _elements(gathers) / count >= _TWICE * model


def _elements(rank_ops: Sequence[RankOp]) -> float:
    return float(sum(own.bytes / DTYPE_BYTES.get(own.collective.dtype or "", 1) for own in rank_ops))


def _model_elements(context: Context, shards: int) -> float | None:
    """Elements of the model, of which each of ``shards`` ranks holds a part; None where a run did not count its own."""
    own = [run.model.parameters for run in context.runs.values() if run.model is not None]
    if not own or not all(own) or len(own) != len(context.result.partials):
        return None
    return sum(own) / len(own) * shards
