"""Pipeline stages that take longer than the others for the same work.

The ranks of one stage are each other's peers, so a stage that is slow as a whole has no slow rank. Stages that compute
the same number of FLOPs do the same work: among those, one that takes longer than their median is slow. A stage with
more work than the others is not slow but too big; that is imbalance, which ``pipeline`` tells.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.pipelines.stages import ranks_of, stages
from perfscope.analyzers.replay.engine import Programs
from perfscope.analyzers.replay.pace import scaled
from perfscope.analyzers.timeline import Row
from perfscope.trace import Float64

SAME_WORK: Final = 0.02
"""Stages whose FLOPs differ by no more than this share do the same work."""

_COMPARED: Final = (Row.COMPUTE, Row.LAUNCH, Row.HOST)
"""Rows that stages have in common. Only some of them load batches, copy or print."""


@dataclass(frozen=True)
class SlowStage:
    """``ranks`` take ``factor`` times their own time at the other stages' pace; ``row`` is where they exceed it most,
    ``slowest`` the one with the most time of its own.
    """

    ranks: tuple[int, ...]
    slowest: int
    row: Row
    factor: float


def slow_stages(result: Comparison, blamed: Collection[int]) -> list[SlowStage]:
    """Stages all of whose ranks are slower than the stages of the same work; empty without a pipeline or FLOPs."""
    members = ranks_of(stages(result))
    flops = {stage: _flops(result, ranks) for stage, ranks in members.items()}
    own = {stage: np.min([_own_rows(result, rank) for rank in ranks], axis=0) for stage, ranks in members.items()}
    found = []
    for stage, ranks in members.items():
        alike = [own[other] for other, count in flops.items() if other != stage and _same(count, flops[stage])]
        if not alike or any(rank in blamed for rank in ranks):
            continue
        usual = np.median(alike, axis=0)
        excess = (own[stage] - usual)[[int(row) for row in _COMPARED]]
        if excess.sum() > 0:
            slowest = max(ranks, key=lambda rank: float(_own_rows(result, rank).sum()))
            total = float(own[stage].sum())
            row = _COMPARED[int(excess.argmax())]
            found.append(SlowStage(ranks, slowest, row, (total - float(excess.sum())) / total))
    return found


def at_other_stages_pace(programs: Programs, slow: Sequence[SlowStage]) -> Programs:
    """Programs in which these stages are as quick as the others."""
    for stage in slow:
        programs = scaled(programs, stage.ranks, stage.factor)
    return programs


def _same(one: float, other: float) -> bool:
    return one > 0 and abs(one - other) <= SAME_WORK * max(one, other)


def _flops(result: Comparison, ranks: tuple[int, ...]) -> float:
    """Model FLOPs per step of a stage's rank, mean over its ranks."""
    counts = []
    for rank in ranks:
        partial = result.partials[rank]
        counts.append(float(partial.flops.model.sum(axis=0)[partial.steps.indices_of(result.steps)].mean()))
    return float(np.mean(counts))


def _own_rows(result: Comparison, rank: int) -> Float64:
    """Ns per step of each row of one rank's own account."""
    start, end = result.windows[rank]
    rows = result.partials[rank].progress.own.totals(start, end).sum(axis=0) / len(start)
    rows[Row.COMM_TRANSFER] = rows[Row.COMM_WAIT] = 0
    return np.asarray(rows, dtype=np.float64)
