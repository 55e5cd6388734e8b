"""Pipeline stages that take longer than the others for the same work.

The ranks of one stage are each other's peers, so a stage that is slow as a whole has no slow rank. Stages that compute
the same number of FLOPs do the same work: among those, one that takes longer than their median is slow. A stage with
more work than the others is not slow but too big; that is imbalance, which ``pipeline`` tells.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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

_COMPARED_ROWS: Final = [int(row) for row in _COMPARED]


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
    paces = {stage: [_Pace.of(result, rank) for rank in ranks] for stage, ranks in members.items()}
    together = {stage: _Pace.mean(mine) for stage, mine in paces.items()}
    found = []
    for stage, ranks in members.items():
        alike = [together[other] for other, count in flops.items() if other != stage and _same(count, flops[stage])]
        if not alike or any(rank in blamed for rank in ranks):
            continue
        excess = np.min([pace.excess(alike) for pace in paces[stage]], axis=0)
        total = min(float(pace.rows.sum()) for pace in paces[stage])
        if 0 < excess.sum() < total:
            slowest = max(zip(ranks, paces[stage], strict=True), key=lambda pair: float(pair[1].rows.sum()))[0]
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


@dataclass(frozen=True, eq=False)
class _Pace:
    """How quickly one rank works. ``rows`` is its own time, ns per step, by row of the account; ``kernels`` are, for
    each kernel by name, how often it runs and how long in all, per step.

    Stages that multiply as much may differ in the rest: the last one has the loss, the first one the embedding. So the
    same kernels are compared, and the host's time for each kernel launched.
    """

    rows: Float64
    kernels: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, result: Comparison, rank: int) -> _Pace:
        """That of one rank over the used steps."""
        partial, (start, end) = result.partials[rank], result.windows[rank]
        rows = np.asarray(partial.progress.own.totals(start, end).sum(axis=0) / len(start), dtype=np.float64)
        rows[Row.COMM_TRANSFER] = rows[Row.COMM_WAIT] = 0
        table, chosen = partial.tables.kernels, partial.steps.indices_of(result.steps)
        count, total = table.count[:, chosen].mean(axis=1), table.total_ns[:, chosen].mean(axis=1)
        lines = zip(table.names, table.category, count.tolist(), total.tolist(), strict=True)
        return cls(rows, {name: (n, ns) for name, category, n, ns in lines if category == "compute" and n})

    @classmethod
    def mean(cls, paces: Sequence[_Pace]) -> _Pace:
        """That of several ranks together."""
        kernels: dict[str, tuple[float, float]] = {}
        for pace in paces:
            for name, (count, total) in pace.kernels.items():
                known = kernels.get(name, (0.0, 0.0))
                kernels[name] = known[0] + count / len(paces), known[1] + total / len(paces)
        return cls(np.asarray(np.mean([pace.rows for pace in paces], axis=0), dtype=np.float64), kernels)

    @property
    def launched(self) -> float:
        """Compute kernels per step."""
        return sum(count for count, _ in self.kernels.values())

    def excess(self, alike: Sequence[_Pace]) -> Float64:
        """Ns per step of each compared row beyond the median at the paces of other stages."""
        usual = np.median([pace.at_work_of(self) for pace in alike], axis=0)
        return np.asarray(self.rows[_COMPARED_ROWS] - usual, dtype=np.float64)

    def at_work_of(self, other: _Pace) -> Float64:
        """What the compared rows of ``other`` would take at this pace; without kernels, as long as its own."""
        mine = np.asarray(self.rows[_COMPARED_ROWS], dtype=np.float64)
        common = self.kernels.keys() & other.kernels.keys()
        taken = sum(other.kernels[name][1] for name in common)
        if not common or taken <= 0:
            return mine
        here = sum(other.kernels[name][0] * self.kernels[name][1] / self.kernels[name][0] for name in common)
        theirs = sum(total for _, total in other.kernels.values())
        mine *= other.launched / self.launched
        mine[_COMPARED.index(Row.COMPUTE)] = other.rows[Row.COMPUTE] * (1 + (here - taken) / theirs)
        return mine
