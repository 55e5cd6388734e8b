"""What work costs that a setting would make unnecessary, over the used steps of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from statistics import median, median_low
from typing import Protocol, TypeVar

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.rank.partial import ExtraWork, RankPartial
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Int64


class _OfPart(Protocol):
    """A cost of one part of the training loop."""

    @property
    def part(self) -> str: ...


_Cost = TypeVar("_Cost", bound=_OfPart)


@dataclass(frozen=True)
class ExtraCost:
    """Medians over the ranks, per step: compute time in it (µs), how often it is done, and by how many bytes memory
    grows in it, all times together (None where that is not recorded).
    """

    us: float
    count: float
    grown_bytes: float | None


def extra_cost(result: AlignedJob, of: Callable[[RankPartial], ExtraWork]) -> ExtraCost | None:
    """That of one sort of work; None where no rank does it in the used steps."""
    costs, counts, grown = [], [], []
    for rank, partial in result.partials.items():
        work, used = of(partial), partial.steps.indices_of(result.steps)
        spent = work.of_rank(on_device=partial.has_device_work)
        computing = spent.intersect(result.timelines[rank].where(TimeCategory.COMPUTE))
        costs.append(float(computing.within(*result.windows[rank]).mean()) / 1e3)
        counts.append(float(work.count[used].mean()))
        if work.grown_bytes is not None:
            grown.append(float(np.max(work.grown_bytes[used])))
    if not any(counts):
        return None
    return ExtraCost(median(costs), median(counts), median(grown) if len(grown) == len(costs) else None)


@dataclass(frozen=True)
class LoopCost:
    """Loops over many tensors in one part of the training loop: medians over the ranks, per step: small operators (on
    devices kernels), and their time (µs). ``operators`` are what they mostly call.
    """

    part: str
    count: float
    us: float
    operators: tuple[str, ...]


def loop_costs(result: AlignedJob) -> tuple[LoopCost, ...]:
    """Those of each part that most ranks loop in, the costliest first."""
    costs = (
        LoopCost(part.name, float(part.count[used].mean()), float(part.took_ns[used].mean()) / 1e3, part.operators)
        for partial, used in _used(result)
        for part in partial.loops.parts
    )
    usual = [
        LoopCost(rows[0].part, median(row.count for row in rows), median(row.us for row in rows), rows[0].operators)
        for rows in _of_most_ranks(costs, result)
    ]
    return tuple(sorted(usual, key=lambda row: -row.us))


def _used(result: AlignedJob) -> Iterator[tuple[RankPartial, Int64]]:
    """Each rank with the indices of the used steps in its own."""
    for partial in result.partials.values():
        yield partial, partial.steps.indices_of(result.steps)


def _of_most_ranks(costs: Iterable[_Cost], result: AlignedJob) -> list[list[_Cost]]:
    """The costs of each part of the loop that most ranks have."""
    found = grouped((cost.part, cost) for cost in costs)
    return [rows for rows in found.values() if 2 * len(rows) > len(result.partials)]


@dataclass(frozen=True)
class LoopWorkCost:
    """What one part of the training loop computes beside the training: medians over the ranks, per step: its time (µs),
    and the model's forwards without gradients. ``operators`` take longest there; ``of_model``: some are layers.
    """

    part: str
    us: float
    forwards: float
    operators: tuple[str, ...]
    of_model: bool


def loop_work_costs(result: AlignedJob) -> tuple[LoopWorkCost, ...]:
    """Those of each part that most ranks compute in, the costliest first."""
    costs = (
        LoopWorkCost(
            part.name,
            float(part.took_ns[used].mean()) / 1e3,
            float(part.forwards[used].mean()),
            part.operators,
            part.of_model,
        )
        for partial, used in _used(result)
        for part in partial.loop_work
    )
    usual = [
        LoopWorkCost(
            rows[0].part,
            _of_most(row.us for row in rows),
            _of_most(row.forwards for row in rows),
            rows[0].operators,
            of_model=rows[0].of_model,
        )
        for rows in _of_most_ranks(costs, result)
    ]
    return tuple(sorted(usual, key=lambda row: -row.us))


def _of_most(values: Iterable[float]) -> float:
    """The median; of two that are unlike the smaller one: what one of two ranks does alone is not the job's."""
    every = list(values)
    low = median_low(every)
    return median(every) if low >= median(every) / 2 else low
