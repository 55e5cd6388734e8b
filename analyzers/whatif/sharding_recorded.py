"""What a recording shows of sharding: gathers, reductions, the ZeRO stage, units and the phases of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.rank.loop_phases import DDP_FORWARD
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.whatif.change import Context
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules, StepCollectives
from perfscope.analyzers.whatif.schedules.ops import RankOp, ScheduleOp
from perfscope.analyzers.whatif.schedules.steps import StepOps
from perfscope.frozen import dataclass
from perfscope.recording.vocabulary import FORWARD, OPTIMIZER
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Float64

_FORWARD_SHARE: Final = 1 / 3
"""Share of forward and backward, where the forward is not marked: one matrix product to the backward's two."""
_PLAUSIBLE: Final = (0.1, 0.6)
"""Bounds of that share: outside them a range is not the model's forward."""
_SPLIT: Final = 8
"""Equal units, assumed where too few buckets are recorded to stand for units."""
_TORCH_OPTIMIZER: Final = "Optimizer.step#"


def reductions_by_step(schedules: EditableSchedules) -> StepCollectives:
    """Reductions of gradients: reduce-scatters, else all-reduces; empty where none is recorded with its size."""
    return schedules.of_gradients("reduce_scatter") or schedules.of_gradients("all_reduce")


@dataclass(frozen=True)
class Units:
    """What is gathered at once, in the order of the forward: bytes of each unit, and of the rest, which the root holds.
    ``known``: recorded, not assumed.
    """

    blocks: tuple[float, ...]
    root: float
    known: bool

    @property
    def bounds(self) -> Float64:
        """Share of the blocks' bytes before each block, and 1: blocks compute in proportion to their bytes."""
        return np.concatenate(([0.0], np.cumsum(self.blocks) / sum(self.blocks)))


def units(context: Context, gathers: Sequence[RankOp], reductions: Sequence[RankOp]) -> Units:
    """The units of a model, given the recorded gathers of one pass of one rank and one round of its reductions.

    Recorded gathers are units. Without them each of the model's repeated blocks is one, and the root has the rest: what
    torch and Accelerate advise. Where the run did not record blocks each bucket stands for a unit.
    """
    total = float(sum(rank_op.bytes for rank_op in reductions))
    if len(gathers) > 1:
        sizes = np.array([rank_op.bytes for rank_op in gathers], dtype=np.float64)
        return Units(tuple((sizes * total / sizes.sum()).tolist()), 0.0, known=True)
    for run in context.runs.values():
        model = run.model
        if model is not None and any(model.block_sizes) and model.trainable_bytes:
            scale = total / model.trainable_bytes
            blocks = tuple(size * scale for size in model.block_sizes if size)
            return Units(blocks, max(total - sum(blocks), 0.0), known=True)
    buckets = [float(rank_op.bytes) for rank_op in reductions][::-1]
    if len(buckets) >= _SPLIT // 2:
        return Units(tuple(size * total / sum(buckets) for size in buckets), 0.0, known=False)
    return Units((total / _SPLIT,) * _SPLIT, 0.0, known=False)


@dataclass(frozen=True)
class TrainingPhases:
    """Of one step of one rank, by its own progress (ns): when its forward begins, its last backward ends, the optimizer
    begins and the step ends. The ``microbatches`` take equally long, their forwards the share ``forward`` of that.
    ``rounds``: how often gradients are reduced, once or in every micro-batch.
    """

    begin: float
    end: float
    optimizer: float
    last: float
    microbatches: int
    forward: float
    rounds: int

    def of(self, microbatch: int) -> tuple[float, float, float]:
        """(begin of its forward, of its backward, end of its backward)."""
        length = (self.end - self.begin) / self.microbatches
        begin = self.begin + microbatch * length
        return begin, begin + self.forward * length, begin + length


def phases(context: Context, step_ops: StepOps, reductions: Sequence[RankOp]) -> TrainingPhases:
    """The backward ends when the last gradients are issued, the optimizer begins after the waits for all of them; the
    forward begins once the step's batch is there.
    """
    mine = set(reductions)
    issues, waits = step_ops.places(OpKind.ISSUE, mine), step_ops.places(OpKind.WAIT, mine)
    rows = np.sum([op.own_ns for op in step_ops.ops[step_ops.begins + 1 : issues[-1] + 1]], axis=0)
    last = step_ops.ends_ns
    # Each moment right before the next, so that new ops come in one order on all ranks.
    end = min(float(step_ops.progress_ns[issues[-1]]), last - 3)
    optimizer = min(max(end, float(step_ops.progress_ns[waits[-1]]) if waits else end), last - 2)
    begin = float(step_ops.progress_ns[step_ops.begins]) + float(
        rows[TimeCategory.DATALOADER] + rows[TimeCategory.COPY]
    )
    partial = context.result.partials[step_ops.rank]
    index = int(partial.steps.indices_of(np.array([step_ops.step]))[0])
    work = rows[TimeCategory.COMPUTE] if partial.has_device_work else rows.sum() - rows[TimeCategory.DATALOADER]
    count = partial.microbatches(step_ops.step)
    rounds = count if step_ops.in_every_part(mine, count) else 1
    return TrainingPhases(
        min(begin, end), end, optimizer, last, count, _forward_share(partial, index, float(work)), rounds,
    )  # fmt: skip


def _forward_share(partial: RankPartial, index: int, work_ns: float) -> float:
    """The forward's share of forward and backward: ``work_ns`` in all."""
    took = _range_ns(partial, index, (FORWARD, DDP_FORWARD))
    if took is None or work_ns <= 0 or not _PLAUSIBLE[0] <= took / work_ns <= _PLAUSIBLE[1]:
        return _FORWARD_SHARE
    return took / work_ns


def optimizer_ns(context: Context, rank: int, step: int) -> float:
    """What the optimizer takes in one step of a rank, ns, on its device, else on its host; 0 where not marked."""
    partial = context.result.partials[rank]
    index = int(partial.steps.indices_of(np.array([step]))[0])
    named = tuple(name for name in partial.tables.modules.names if name.startswith(_TORCH_OPTIMIZER))
    return _range_ns(partial, index, (OPTIMIZER, *named)) or 0.0


def fluctuation_ns(own: Mapping[int, Sequence[float]]) -> float:
    """Standard deviation of a rank's own time (ns, rank -> step by step), without what all ranks have in common and
    what a rank has in all steps. Ranks with missing steps do not count.
    """
    most = max(map(len, own.values()))
    times = np.array([steps for steps in own.values() if len(steps) == most], dtype=np.float64)
    if min(times.shape) < 2:
        return 0.0
    left = times - times.mean(axis=0) - times.mean(axis=1, keepdims=True) + times.mean()
    return float(np.sqrt((left**2).sum() / ((times.shape[0] - 1) * (times.shape[1] - 1))))


def _range_ns(partial: RankPartial, index: int, names: Sequence[str]) -> float | None:
    """Time of the first of these ranges that is recorded, in the step of that index."""
    modules = partial.tables.modules
    place = next((modules.names.index(name) for name in names if name in modules.names), None)
    if place is None:
        return None
    return float((modules.device_ns if partial.has_device_work else modules.host_ns)[place, index])


def compute_more(ops: Sequence[ScheduleOp], step: int, when: TrainingPhases, ns: float) -> None:
    """Add ``ns`` to the computation of a step after its optimizer has begun; negative: take out as much as there is."""
    first = next(at for at, op in enumerate(ops) if op.step == step)
    passed = 0.0
    for op in ops[first:]:
        passed += float(op.own_ns.sum())
        if ns == 0 or passed > when.last + 1:
            return
        computed = float(op.own_ns[TimeCategory.COMPUTE])
        if passed > when.optimizer + 1 and computed > 0:  # beyond rounding
            changed = max(ns, -computed)
            op.add(TimeCategory.COMPUTE, changed)
            ns -= changed
