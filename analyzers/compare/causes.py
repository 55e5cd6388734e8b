"""Which categories explain that the step time changed: those that moved with it, and carry most of the change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from perfscope.results.comparison import CategoryChange, StepChange

_MOST: Final = 0.5
"""Share of the change that significant categories must carry together to be its cause."""

_NEARLY_ALL: Final = 0.8
"""Share of the change that is listed where they do not."""


def causes_of(step: StepChange, categories: Sequence[CategoryChange]) -> tuple[tuple[str, ...], bool]:
    """(categories that moved in the direction of the step time, the largest first; whether all are significant).

    Significant ones where they carry most of the change; else those that it is made up of, significant or not. Empty
    where the step time did not change significantly.
    """
    if step.verdict not in ("faster", "slower"):
        return (), False
    along = sorted((row for row in categories if row.delta_us * step.delta_us > 0), key=lambda row: -abs(row.delta_us))
    certain = [row for row in along if row.significant]
    if sum(abs(row.delta_us) for row in certain) >= _MOST * abs(step.delta_us):
        return tuple(row.name for row in certain), bool(certain)
    listed: list[str] = []
    carried = 0.0
    for row in along:
        if carried >= _NEARLY_ALL * abs(step.delta_us):
            break
        listed.append(row.name)
        carried += abs(row.delta_us)
    return tuple(listed), False
