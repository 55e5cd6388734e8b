"""Critical path, collectives, ranks, kernels and operators of two recordings: what changed, and which significantly."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import median_high, median_low
from typing import Final, Literal

import numpy as np

from perfscope.analyzers.compare.noise import OWN_SHARE, part_floor, significant_parts
from perfscope.frozen import dataclass
from perfscope.results.comparison import CollectiveChange, PathChange, RankChange, StepChange, WorkChange
from perfscope.results.rows import CollectiveRow
from perfscope.results.summary import Summary
from perfscope.results.time_breakdown import TimeBreakdown
from perfscope.trace.trace import Float64

_Key = tuple[str, str, str | None, int | None]
_APART: Final = 0.25
"""Share of the ranks' median change by which the change of a rank must differ from it to stand out."""


def path_changes(baseline: Summary, candidate: Summary) -> tuple[PathChange, ...]:
    """The critical path by category; empty where a job has none, or one that does not cover the whole step."""
    if not _has_whole_path(baseline) or not _has_whole_path(candidate):
        return ()
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for place, summary in enumerate((baseline, candidate)):
        for row in summary.critical_path or ():
            totals[row.category][place] += row.us
    changes = [
        PathChange(category=name, baseline_us=first, candidate_us=second) for name, (first, second) in totals.items()
    ]
    return tuple(sorted(changes, key=lambda change: -abs(change.delta_us)))


def _has_whole_path(summary: Summary) -> bool:
    if summary.critical_path is None:
        return False
    return math.isclose(math.fsum(row.us for row in summary.critical_path), summary.job.step_time_us, rel_tol=1e-9)


def collective_changes(baseline: Summary, candidate: Summary, step: StepChange) -> tuple[CollectiveChange, ...]:
    """Every (group, kind, type, size) of either job, the largest change first.

    Groups are matched by name; where the names differ, by role.
    """
    first, second = _collectives(baseline), _collectives(candidate)
    if not {key[0] for key in first} & {key[0] for key in second}:
        first, second = _collectives(baseline, by_role=True), _collectives(candidate, by_role=True)
    both = [(key, first.get(key), second.get(key)) for key in {**first, **second}]
    pairs = [(_times(old, baseline), _times(new, candidate)) for _, old, new in both]
    totals = [(old.transfer if old else 0.0, new.transfer if new else 0.0) for _, old, new in both]
    significant = significant_parts(pairs, [new - old for old, new in totals], [max(each) for each in totals], step)
    changes = [_collective(*each, is_significant) for each, is_significant in zip(both, significant, strict=True)]
    return tuple(sorted(changes, key=lambda change: -abs(change.delta_us)))


class _Collective:
    """Sums over the rows of one key, per step."""

    def __init__(self) -> None:
        self.count = 0.0
        self.transfer = 0.0
        self.wait: float | None = 0.0
        self.busbw: float | None = None
        self.per_step: Float64 = np.zeros(0)

    def add(self, row: CollectiveRow, steps: int) -> None:
        count = row.count / steps
        self.count += count
        self.transfer += count * row.transfer_us
        self.wait = None if row.wait_us is None or self.wait is None else self.wait + count * row.wait_us
        self.busbw = row.busbw_gbps
        times = np.array(row.transfer_us_per_step)
        self.per_step = self.per_step + times if len(self.per_step) == len(times) else times

    @property
    def one_us(self) -> float | None:
        return self.transfer / self.count if self.count else None


def _collectives(summary: Summary, by_role: bool = False) -> dict[_Key, _Collective]:
    roles = {row.name: f"{row.role} group" for row in summary.groups} if by_role else {}
    steps = max(len(summary.job.steps), 1)
    collectives: dict[_Key, _Collective] = defaultdict(_Collective)
    for row in summary.collectives:
        collectives[roles.get(row.group, row.group), row.kind, row.dtype, row.bytes].add(row, steps)
    return collectives


def _times(collective: _Collective | None, summary: Summary) -> Float64:
    """Transfer in each used step, µs: zeros where only the other job has it; empty where the steps are not known."""
    return collective.per_step if collective is not None else np.zeros(len(summary.job.steps))


def _collective(
    key: _Key, first: _Collective | None, second: _Collective | None, significant: bool | None
) -> CollectiveChange:
    baseline, candidate = first or _Collective(), second or _Collective()
    wait = candidate.wait - baseline.wait if candidate.wait is not None and baseline.wait is not None else None
    group, kind, dtype, size = key
    return CollectiveChange(
        group=group,
        kind=kind,
        dtype=dtype,
        bytes=size,
        status="new" if first is None else "gone" if second is None else "both",
        baseline_count=baseline.count,
        candidate_count=candidate.count,
        baseline_transfer_us=baseline.one_us,
        candidate_transfer_us=candidate.one_us,
        baseline_busbw_gbps=baseline.busbw,
        candidate_busbw_gbps=candidate.busbw,
        baseline_us=baseline.transfer,
        candidate_us=candidate.transfer,
        wait_delta_us=wait,
        significant=significant,
    )


_Middle = Literal["lower", "higher"]


def rank_changes(baseline: Summary, candidate: Summary, step: StepChange) -> tuple[RankChange, ...]:
    """Ranks in both recordings; a rank whose own time changed differently from its peers' stands out."""
    first = {row.rank: row for row in baseline.time_breakdown}
    both = [(first[row.rank], row) for row in candidate.time_breakdown if row.rank in first]
    if not both:
        return ()
    own = [(_own_us(old), _own_us(new)) for old, new in both]
    typical, middle = _typical([new - old for old, new in own])
    apart = [new - old - typical for old, new in own]
    pairs = list(zip(*(_beside_peers(rows, middle) for rows in zip(*both, strict=True)), strict=True))
    significant = significant_parts(pairs, apart, [max(each) for each in own], step)
    changes = []
    for (old, new), differs, is_significant in zip(both, apart, significant, strict=True):
        changes.append(
            RankChange(
                rank=new.rank,
                baseline_host=old.host,
                candidate_host=new.host,
                baseline_us=old.step_time_us,
                candidate_us=new.step_time_us,
                categories_us={name: us - old.categories()[name] for name, us in new.categories().items()},
                stands_out=len(both) > 2 and is_significant is True and abs(differs) >= _APART * abs(typical),
            )
        )
    return tuple(changes)


def _typical(changes: Sequence[float]) -> tuple[float, _Middle]:
    """(the median change, which of the two middle ones it is): of as many ranks that changed as did not, the smaller.

    Example: of 0, 0, 1 and 2.5 it is 0, and not 0.5, from which all ranks would differ.
    """
    low, high = median_low(changes), median_high(changes)
    return (low, "lower") if abs(low) <= abs(high) else (high, "higher")


def _beside_peers(rows: Sequence[TimeBreakdown], middle: _Middle) -> list[Float64]:
    """Each rank's own time in each step minus the ranks' median, which removes what all ranks share; empty where the
    times of steps are not known.
    """
    if len({len(row.own_us_per_step) for row in rows}) > 1:
        return [np.zeros(0) for _ in rows]
    own = np.array([row.own_us_per_step for row in rows])
    return list(own - np.quantile(own, 0.5, axis=0, method=middle))


def _own_us(row: TimeBreakdown) -> float:
    """The rank's own time: the step without the wait for others."""
    return row.step_time_us - row.exposed_comm_wait_us


_ERRORS: Final = 3.0
"""Standard errors by which a mean duration must change."""


@dataclass(frozen=True)
class _Work:
    name: str
    category: str
    count: float
    us: float
    error_us: float | None
    """Upper bound of the standard error of the mean duration; None where no spread is recorded."""

    @property
    def mean_us(self) -> float:
        return self.us / self.count if self.count else 0.0


def kernel_changes(baseline: Summary, candidate: Summary, step: StepChange) -> tuple[WorkChange, ...]:
    """Device time of each kernel, the largest change first."""
    return _changes(_kernels(baseline), _kernels(candidate), step)


def operator_changes(baseline: Summary, candidate: Summary, step: StepChange) -> tuple[WorkChange, ...]:
    """Device and own host time of each operator, the largest change first."""
    return _changes(_operators(baseline), _operators(candidate), step)


def _kernels(summary: Summary) -> dict[tuple[str, str], _Work]:
    instances = max(len(summary.job.steps), 1) * max(len(summary.job.ranks), 1)
    return {
        (row.name, row.category): _Work(
            row.name,
            row.category,
            row.count_per_step,
            row.us_per_step,
            # No sample spreads more than half its range (Popoviciu 1935).
            (row.max_us - row.min_us) / 2 / math.sqrt(max(row.count_per_step * instances, 1.0)),
        )
        for row in summary.kernels
    }


def _operators(summary: Summary) -> dict[tuple[str, str], _Work]:
    return {
        (row.name, row.operator_class): _Work(
            row.name, row.operator_class, row.count_per_step, row.device_us_per_step + row.host_us_per_step, None
        )
        for row in summary.operators
    }


def _changes(
    first: dict[tuple[str, str], _Work], second: dict[tuple[str, str], _Work], step: StepChange
) -> tuple[WorkChange, ...]:
    changes = (_change(key, first.get(key), second.get(key), step) for key in {**first, **second})
    return tuple(sorted(changes, key=lambda change: (-abs(change.delta_us), change.name)))


def _change(key: tuple[str, str], first: _Work | None, second: _Work | None, step: StepChange) -> WorkChange:
    nothing = _Work(*key, count=0.0, us=0.0, error_us=0.0)
    baseline, candidate = first or nothing, second or nothing
    delta = candidate.us - baseline.us
    if first is None or second is None:
        from_count = delta
    else:
        # The change of the number of calls times the mean of both durations; the rest is by duration, exactly.
        from_count = (candidate.count - baseline.count) * (baseline.mean_us + candidate.mean_us) / 2
    return WorkChange(
        name=baseline.name,
        category=baseline.category,
        status="new" if first is None else "gone" if second is None else "both",
        baseline_count=baseline.count,
        candidate_count=candidate.count,
        baseline_us=baseline.us,
        candidate_us=candidate.us,
        from_count_us=from_count,
        from_duration_us=delta - from_count,
        significant=_is_significant(baseline, candidate, from_count, step),
    )


def _is_significant(baseline: _Work, candidate: _Work, from_count: float, step: StepChange) -> bool | None:
    delta = candidate.us - baseline.us
    if step.noise_us is None:
        return None
    if abs(delta) < max(part_floor(step), OWN_SHARE * max(baseline.us, candidate.us)):
        return False
    if abs(from_count) >= abs(delta) / 2:
        return True
    if baseline.error_us is None or candidate.error_us is None:
        return abs(delta) > step.noise_us
    moved = abs(candidate.mean_us - baseline.mean_us)
    return moved > _ERRORS * math.hypot(baseline.error_us, candidate.error_us)
