"""Where a step's forward and backward lie in a rank's own progress, and what of the model is gathered at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.rank import DDP_FORWARD, RankPartial
from perfscope.analyzers.replay.engine import Op
from perfscope.analyzers.timeline import Row
from perfscope.analyzers.whatif.change import Context
from perfscope.analyzers.whatif.relay import Stretch
from perfscope.analyzers.whatif.script import Line, Part
from perfscope.trace import Float64
from perfscope.vocabulary import FORWARD, OPTIMIZER

_FORWARD_SHARE: Final = 1 / 3
"""Of forward and backward, where nothing marks the forward: one matrix product to the backward's two."""
_PLAUSIBLE: Final = (0.1, 0.6)
"""Bounds of that share: outside them a range is not the model's forward."""
_SPLIT: Final = 8
"""Even units that are assumed where too few buckets are recorded to stand for units."""
_TORCH_OPTIMIZER: Final = "Optimizer.step#"


@dataclass(frozen=True)
class Units:
    """What is gathered at once, in the order of the forward: bytes of each unit, and of what the root holds beside
    them. ``known``: recorded, not assumed.
    """

    blocks: tuple[float, ...]
    root: float
    known: bool

    @property
    def bounds(self) -> Float64:
        """Share of the blocks' bytes before each block, and 1: blocks compute in proportion to their bytes."""
        return np.concatenate(([0.0], np.cumsum(self.blocks) / sum(self.blocks)))


def units(context: Context, gathers: Sequence[Part], reductions: Sequence[Part]) -> Units:
    """The units of a model, given one step's recorded gathers of one rank and one round of its reductions.

    Units that are gathered already are what they are. Otherwise each of the model's repeated blocks is one, and the
    root has the rest: what torch and Accelerate advise. Where the run did not record them each bucket stands for one.
    """
    total = float(sum(part.meeting.bytes or 0 for part in reductions))
    if len(gathers) > 1:
        sizes = np.array([part.meeting.bytes or 0 for part in gathers], dtype=np.float64)
        return Units(tuple((sizes * total / sizes.sum()).tolist()), 0.0, known=True)
    for run in context.runs.values():
        model = run.model
        if model is not None and any(model.block_sizes) and model.trainable_bytes:
            scale = total / model.trainable_bytes
            blocks = tuple(size * scale for size in model.block_sizes if size)
            return Units(blocks, max(total - sum(blocks), 0.0), known=True)
    buckets = [float(part.meeting.bytes or 0) for part in reductions][::-1]
    if len(buckets) >= _SPLIT // 2:
        return Units(tuple(size * total / sum(buckets) for size in buckets), 0.0, known=False)
    return Units((total / _SPLIT,) * _SPLIT, 0.0, known=False)


@dataclass(frozen=True)
class Phases:
    """Of one step of one rank, by its own progress (ns): when its forward begins, its last backward ends, the optimizer
    begins and the step ends. The ``microbatches`` take equally long, their forwards the share ``forward`` of that.
    """

    begin: float
    end: float
    optimizer: float
    last: float
    microbatches: int
    forward: float

    def of(self, microbatch: int) -> tuple[float, float, float]:
        """(begin of its forward, of its backward, end of its backward)."""
        length = (self.end - self.begin) / self.microbatches
        begin = self.begin + microbatch * length
        return begin, begin + self.forward * length, begin + length


def phases(context: Context, stretch: Stretch, rank: int, step: int, reductions: Sequence[Part]) -> Phases:
    """The backward ends when the last gradients are handed over, the optimizer begins once all were waited for; the
    forward begins once the step's batch is there.
    """
    mine = set(reductions)
    handed = [at for at, line in enumerate(stretch.lines) if line.op is Op.ISSUE and line.part in mine]
    waits = [at for at, line in enumerate(stretch.lines) if line.op is Op.BLOCK and line.part in mine]
    rows = np.sum([line.own_ns for line in stretch.lines[1 : handed[-1] + 1]], axis=0)
    last = float(stretch.progress_ns[-1])
    # Each moment right before the next, so that what is put in at them comes in one order on all ranks.
    end = min(float(stretch.progress_ns[handed[-1]]), last - 3)
    optimizer = min(max(end, float(stretch.progress_ns[waits[-1]]) if waits else end), last - 2)
    begin = float(stretch.progress_ns[0]) + float(rows[Row.DATALOADER] + rows[Row.COPY])
    partial = context.result.partials[rank]
    index = int(partial.steps.indices_of(np.array([step]))[0])
    # A loader tells the micro-batches of a job whose forwards nothing marks.
    microbatches = int(partial.forwards[index] or partial.loading.batches[index] or 1)
    work = rows[Row.COMPUTE] if partial.has_device_work else rows.sum() - rows[Row.DATALOADER]
    return Phases(min(begin, end), end, optimizer, last, microbatches, _forward_share(partial, index, float(work)))


def _forward_share(partial: RankPartial, index: int, work_ns: float) -> float:
    """The forward's share of forward and backward: ``work_ns`` in all."""
    took = _range_ns(partial, index, (FORWARD, DDP_FORWARD))
    if took is None or work_ns <= 0 or not _PLAUSIBLE[0] <= took / work_ns <= _PLAUSIBLE[1]:
        return _FORWARD_SHARE
    return took / work_ns


def optimizer_ns(context: Context, rank: int, step: int) -> float:
    """What the optimizer's step takes in one step of a rank, ns: its device work, else its host's; 0 if nothing marks
    it.
    """
    partial = context.result.partials[rank]
    index = int(partial.steps.indices_of(np.array([step]))[0])
    named = tuple(name for name in partial.tables.modules.names if name.startswith(_TORCH_OPTIMIZER))
    return _range_ns(partial, index, (OPTIMIZER, *named)) or 0.0


def fluctuation_ns(own: Mapping[int, Sequence[float]]) -> float:
    """Standard deviation of a rank's own time (ns, rank -> step by step), what all ranks have in common left out, and
    what a rank has in all steps. Ranks whose steps are not all there count for nothing.
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
    line = next((modules.names.index(name) for name in names if name in modules.names), None)
    if line is None:
        return None
    return float((modules.device_ns if partial.has_device_work else modules.host_ns)[line, index])


def compute_more(lines: Sequence[Line], step: int, when: Phases, ns: float) -> None:
    """Add ``ns`` to the computation of a step after its optimizer has begun; negative: take it out, as far as there is
    any.
    """
    first = next(at for at, line in enumerate(lines) if line.step == step)
    passed = 0.0
    for line in lines[first:]:
        passed += float(line.own_ns.sum())
        if ns == 0 or passed > when.last + 1:
            return
        computed = float(line.own_ns[Row.COMPUTE])
        if passed > when.optimizer + 1 and computed > 0:  # beyond rounding
            changed = max(ns, -computed)
            line.own_ns[Row.COMPUTE] += changed
            ns -= changed
