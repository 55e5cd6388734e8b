"""Whether a summary that was read from a file can be true: numbers that may not be negative, arrays that run in
parallel, parts that add up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from perfscope.results.fields import Field, fields_of
from perfscope.results.summary import Summary

_MOST: Final = {"µs": 1e16, "0..1": 1e9, "ratio": 1e9, "count": 1e15}
"""Greatest value by unit: 1e16 µs are 317 years, and some times are counted from 1970. 1e30 of all others."""

_ROUNDING: Final = 1e-3
"""How far below 0 a difference of two measured times may be by rounding alone."""


_UNLIKE: Final = 1e-6
"""Share of the step by which sums of the same times may differ by rounding."""


def check(summary: Summary) -> None:
    """Raise ValueError, naming the field, where a summary cannot be one that was made of a recording."""
    _check(summary, "$")
    for strip in summary.step_timeline:
        if not len(strip.categories) == len(strip.start_us) == len(strip.duration_us):
            raise ValueError(f"the step timeline of rank {strip.rank} has arrays of unlike lengths")
    summary.self_check()
    _check_steps(summary)


def _check_steps(summary: Summary) -> None:
    """The job's step time is the mean of its steps, and a category's of its parts: comparisons rest on either."""
    job, rows = summary.job, summary.time_breakdown
    means = {"step_time_us": (job.step_time_us_per_step, job.step_time_us)} if job.steps else {}
    for name in rows[0].categories() if rows else ():
        whole = sum(row.categories()[name] for row in rows) / len(rows)
        means[f"time_breakdown.{name}"] = (job.time_breakdown_us_per_step.get(name, ()), whole)
    for name, (per_step, mean) in means.items():
        if per_step and abs(sum(per_step) / len(per_step) - mean) > _UNLIKE * job.step_time_us + _ROUNDING:
            raise ValueError(f"the steps' times do not have the mean that is given - at `$.{name}`")


def _check(owner: Any, place: str) -> None:
    kind: Any = type(owner)
    for name, field in fields_of(kind).items():
        _value(getattr(owner, name), field, f"{place}.{name}")


def _value(value: Any, field: Field, place: str) -> None:
    if dataclasses.is_dataclass(value):
        _check(value, place)
    elif isinstance(value, (tuple, Mapping)):
        # Of a tuple the elements' field, of a mapping the values'.
        within = field.items[-1] if field.items else field
        if within.unit or not _plain(within.type):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, item in items:
                _value(item, within, f"{place}[{key}]")
    elif field.unit and isinstance(value, (int, float)):
        least = -_MOST.get(field.unit, 1e30) if field.signed else -_ROUNDING
        if not least <= value <= _MOST.get(field.unit, 1e30):
            raise ValueError(f"{value} is no number of {field.unit} that can be true - at `{place}`")


def _plain(kind: Any) -> bool:
    return kind in (str, int, float, bool, object, Any)
