"""How quickly a pipeline stage's devices and hosts work: what stages that do the same work are compared by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.rank.work.tables import OperatorTimes
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Float64, Int64

SAME_WORK: Final = 0.02
"""Stages whose FLOPs differ by no more than this share do the same work."""

SAME_KERNELS: Final = 0.85
"""Share of its kernels that a stage must have in common with another where FLOPs are not known. The embedding and the
loss are a few of many; a layer more in a stage of four is a fifth."""

COMPARED: Final = (TimeCategory.COMPUTE, TimeCategory.LAUNCH, TimeCategory.HOST)
"""Categories that stages have in common. Only some of them load batches, copy or print."""

COMPARED_ROWS: Final = [int(row) for row in COMPARED]
"""The same as columns of own time."""

BY_HOST: Final = [COMPARED.index(TimeCategory.LAUNCH), COMPARED.index(TimeCategory.HOST)]
"""Those of the compared categories in which the device waits for its host."""


def same(one: float, other: float) -> bool:
    """Are FLOPs of two stages those of the same work?"""
    return one > 0 and abs(one - other) <= SAME_WORK * max(one, other)


def own_rows(result: AlignedJob, rank: int) -> Float64:
    """A rank's own time by category, ns per used step, without what it waits for others."""
    start, end = result.windows[rank]
    totals = result.partials[rank].progress.own.totals(start, end)
    rows = np.asarray(totals.sum(axis=0) / len(start), dtype=np.float64)
    rows[TimeCategory.COMM_TRANSFER] = rows[TimeCategory.COMM_WAIT] = 0
    return rows


def flops_of_calls(operators: OperatorTimes, chosen: Int64) -> dict[str, float]:
    """Operator -> FLOPs of one call of it, mean over those of these steps."""
    count = operators.count[operators.flops_line][:, chosen].sum(axis=1).tolist()
    flops = operators.flops[:, chosen].sum(axis=1).tolist()
    names = [operators.names[line] for line in operators.flops_line.tolist()]
    return {name: all_ / often for name, often, all_ in zip(names, count, flops, strict=True) if often and all_ > 0}


@dataclass(frozen=True, eq=False)
class WorkPace:
    """How quickly one rank with a device works. ``rows`` is its own time by category, ns per step; ``kernels`` are, for
    each kernel by name, how often it runs and how long in all, per step; ``flops`` are those of one call, by the
    operator's name, where they are known; ``host_busy`` is the host's time per step.

    Stages that multiply as much may differ in the rest: the last one has the loss, the first one the embedding. So the
    same kernels are compared, and the host's time for each kernel launched.
    """

    rows: Float64
    kernels: Mapping[str, tuple[float, float]]
    flops: Mapping[str, float]
    host_busy: float

    @classmethod
    def of(cls, result: AlignedJob, rank: int) -> WorkPace:
        """That of one rank over the used steps."""
        partial = result.partials[rank]
        chosen = partial.steps.indices_of(result.steps)
        kernels = partial.tables.kernels
        count, total_ns = (sums[:, chosen].mean(axis=1).tolist() for sums in (kernels.count, kernels.total_ns))
        lines = zip(kernels.names, kernels.category, count, total_ns, strict=True)
        return cls(
            rows=own_rows(result, rank),
            kernels={name: (often, ns) for name, category, often, ns in lines if category == "compute" and often},
            flops=flops_of_calls(partial.tables.operators, chosen),
            host_busy=float(partial.progress.host_busy_ns[chosen].mean()),
        )

    @classmethod
    def mean(cls, paces: Sequence[WorkPace]) -> WorkPace:
        """That of several ranks together."""
        kernels: dict[str, tuple[float, float]] = {}
        for pace in paces:
            for name, (count, total) in pace.kernels.items():
                known = kernels.get(name, (0.0, 0.0))
                kernels[name] = known[0] + count / len(paces), known[1] + total / len(paces)
        rows = np.asarray(np.mean([pace.rows for pace in paces], axis=0), dtype=np.float64)
        return cls(rows, kernels, paces[0].flops, float(np.mean([pace.host_busy for pace in paces])))

    def does_like(self, other: WorkPace) -> bool:
        """Do both run the same kernels as often, but for some that only the first or the last stage has, and with as
        much to compute in each?
        """
        common = self.flops.keys() & other.flops
        return all(same(self.flops[name], other.flops[name]) for name in common) and self.launches_like(other)

    def launches_like(self, other: WorkPace) -> bool:
        """Do both run the same kernels as often, but for some that only the first or the last stage has?"""
        common = sum(min(self.kernels[name][0], other.kernels[name][0]) for name in self.kernels.keys() & other.kernels)
        return common >= SAME_KERNELS * max(self.launched, other.launched) > 0

    @property
    def launched(self) -> float:
        """Compute kernels per step."""
        return sum(count for count, _ in self.kernels.values())

    def excess(self, alike: Sequence[WorkPace]) -> Float64:
        """Ns per step of each compared category beyond the median at the paces of these stages.

        A device's idle time before launches does not show how slow its host is: where all hosts are, those of stages
        that wait for messages launch meanwhile. So it counts as far as the host was busier for each kernel, too.
        """
        usual = np.median([pace.at_work_of(self) for pace in alike], axis=0)
        over = np.asarray(self.rows[COMPARED_ROWS] - usual, dtype=np.float64)
        others = [pace.host_busy * self.launched / pace.launched for pace in alike if pace.launched]
        busier = max(self.host_busy - float(np.median(others)), 0.0) if others else 0.0
        over[BY_HOST] = np.minimum(over[BY_HOST], busier)
        return over

    def host_factor(self, alike: Sequence[WorkPace]) -> float:
        """How many times as long the host would take at the pace of other stages' hosts, 1 at most."""
        others = [pace.host_busy * self.launched / pace.launched for pace in alike if pace.launched]
        return min(float(np.median(others)) / self.host_busy, 1.0) if others and self.host_busy else 1.0

    def at_work_of(self, other: WorkPace) -> Float64:
        """What the compared categories of ``other`` would take at this pace; without kernels, this rank's own time."""
        mine = np.asarray(self.rows[COMPARED_ROWS], dtype=np.float64)
        common = sorted(self.kernels.keys() & other.kernels.keys())
        taken = np.array([other.kernels[name][1] for name in common], dtype=np.float64)
        if taken.sum() <= 0:
            return mine
        factor = self._factors(other, common, taken)
        theirs = sum(total for _, total in other.kernels.values())
        mine *= other.launched / self.launched
        here = float((taken * (factor - 1)).sum())
        mine[COMPARED.index(TimeCategory.COMPUTE)] = other.rows[TimeCategory.COMPUTE] * (1 + here / theirs)
        return mine

    def _factors(self, other: WorkPace, common: Sequence[str], taken: Float64) -> Float64:
        """How many times as long as at ``other`` each of these kernels takes here.

        One that only runs more often at one of the two also does something there that the other does not have: the
        loss's matrix product is larger than the layers'. Such a kernel differs by no more than those do that run as
        often at both, and where they differ the other way by nothing.
        """
        counts, theirs = (np.array([of.kernels[name][0] for name in common]) for of in (self, other))
        here = np.array([self.kernels[name][1] for name in common]) / counts * theirs
        factor = np.divide(here, taken, out=np.ones_like(taken), where=taken > 0)
        as_often = np.abs(counts - theirs) <= SAME_WORK * np.maximum(counts, theirs)
        if as_often.all() or taken[as_often].sum() <= 0:
            return np.asarray(factor, dtype=np.float64)
        alike = float(here[as_often].sum() / taken[as_often].sum())
        bounded = np.clip(factor, min(alike, 1.0), max(alike, 1.0))
        return np.asarray(np.where(as_often, factor, bounded), dtype=np.float64)
