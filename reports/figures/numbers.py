"""Numbers in a chart, rounded to what a screen shows: the page carries no more digits."""

from __future__ import annotations

from collections.abc import Iterable

from perfscope.text import ScaledUnit, known


def rounded(value: float | None, digits: int = 4) -> float | None:
    """``value`` with so many significant digits; None where it is not a number."""
    return float(f"{value:.{digits}g}") if known(value) else None


def scaled(values: Iterable[float], unit: ScaledUnit, digits: int = 4) -> list[float | None]:
    """Values in ``unit``, rounded."""
    return [rounded(value / unit.size, digits) for value in values]
