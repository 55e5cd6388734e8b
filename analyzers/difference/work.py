"""Kernels and operators of two recordings side by side: which got slower, are called more often, came and went."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from perfscope.analyzers.difference.noise import OWN_SHARE, row_floor
from perfscope.comparison import StepChange, WorkChange
from perfscope.summary import Summary

_ERRORS: Final = 3.0
"""Standard errors that a mean duration must have moved by."""


@dataclass(frozen=True)
class _Work:
    name: str
    category: str
    count: float
    us: float
    error_us: float | None
    """At most the standard error of the mean duration; None where no spread is recorded."""

    @property
    def mean_us(self) -> float:
        return self.us / self.count if self.count else 0.0


def kernel_changes(before: Summary, after: Summary, step: StepChange) -> tuple[WorkChange, ...]:
    """Device time of each kernel, the largest change first."""
    return _changes(_kernels(before), _kernels(after), step)


def operator_changes(before: Summary, after: Summary, step: StepChange) -> tuple[WorkChange, ...]:
    """Device and own host time of each operator, the largest change first."""
    return _changes(_operators(before), _operators(after), step)


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
    return _ordered(changes)


def _ordered(changes: Iterable[WorkChange]) -> tuple[WorkChange, ...]:
    return tuple(sorted(changes, key=lambda change: (-abs(change.delta_us), change.name)))


def _change(key: tuple[str, str], first: _Work | None, second: _Work | None, step: StepChange) -> WorkChange:
    nothing = _Work(*key, count=0.0, us=0.0, error_us=0.0)
    before, after = first or nothing, second or nothing
    delta = after.us - before.us
    if first is None or second is None:
        from_count = delta
    else:
        # Sum of both parts exactly: the mean duration of both times the calls' change, the rest is the durations'.
        from_count = (after.count - before.count) * (before.mean_us + after.mean_us) / 2
    return WorkChange(
        name=before.name,
        category=before.category,
        status="new" if first is None else "gone" if second is None else "both",
        count_before=before.count,
        count_after=after.count,
        before_us=before.us,
        after_us=after.us,
        delta_us=delta,
        from_count_us=from_count,
        from_duration_us=delta - from_count,
        real=_is_real(before, after, from_count, step),
    )


def _is_real(before: _Work, after: _Work, from_count: float, step: StepChange) -> bool | None:
    delta = after.us - before.us
    if step.noise_us is None:
        return None
    if abs(delta) < max(row_floor(step), OWN_SHARE * max(before.us, after.us)):
        return False
    if abs(from_count) >= abs(delta) / 2:
        return True
    if before.error_us is None or after.error_us is None:
        return abs(delta) > step.noise_us
    moved = abs(after.mean_us - before.mean_us)
    return moved > _ERRORS * math.hypot(before.error_us, after.error_us)
