"""A table as the page shows it: cells that know their text, what they sort by and, where empty, why."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from perfscope.text import ABSENT, BYTE_UNITS, TIME_UNITS, ScaledUnit, known, unit_for

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell."""

    text: str
    order: float | str | None = None
    """What the column sorts by; None (an absent value) sorts last in either direction."""
    reason: str = ""
    """Shown on hover: why the value is absent, or what qualifies it."""

    @property
    def absent(self) -> bool:
        """True where there is no value, only a reason."""
        return self.text == ABSENT


@dataclass(frozen=True, kw_only=True)
class Heading:
    """A column's heading."""

    label: str
    unit: str = ""
    definition: str = ""
    """Key of the glossary."""
    numeric: bool = True
    """Right-aligned, in figures of equal width."""
    held: str = ""
    """ScaledUnit in which ``Cell.order`` is held where it is not ``unit``: for what is saved as CSV."""


@dataclass(frozen=True, kw_only=True)
class HtmlTable:
    """A table; the first column of a row is its heading."""

    name: str
    """Unique on the page: its id."""
    title: str
    columns: tuple[Heading, ...]
    rows: tuple[tuple[Cell, ...], ...]
    reading: str = ""
    """The caption: how to read the table and what it shows."""


@dataclass(frozen=True, kw_only=True)
class Filled:
    """A column together with its cells."""

    column: Heading
    cells: tuple[Cell, ...]


def table(name: str, title: str, columns: Sequence[Filled], reading: str = "") -> HtmlTable:
    """Put columns of equal length side by side."""
    return HtmlTable(
        name=name,
        title=title,
        columns=tuple(filled.column for filled in columns),
        rows=tuple(zip(*(filled.cells for filled in columns), strict=True)),
        reading=reading,
    )


def words(label: str, values: Sequence[str], *, definition: str = "", reason: str = "not recorded") -> Filled:
    """A column of text; an empty string is an absent value."""
    return Filled(
        column=Heading(label=label, definition=definition, numeric=False),
        cells=tuple(Cell(text=value, order=value) if value else absent(reason) for value in values),
    )


def ranks(label: str, values: Sequence[int | None]) -> Filled:
    """A column of rank numbers."""
    return column(label, values, str, reason="the rank is not known")


def column(
    label: str,
    values: Sequence[Number | None],
    write: Callable[[Number], str],
    *,
    unit: str = "",
    definition: str = "",
    reason: str = "not known",
) -> Filled:
    """A column of numbers, each as ``write`` writes it."""
    cells = [
        absent(reason) if value is None or not math.isfinite(value) else Cell(text=write(value), order=value)
        for value in values
    ]
    return numbers(label, cells, unit=unit, definition=definition)


def numbers(label: str, values: Sequence[Cell], *, unit: str = "", definition: str = "") -> Filled:
    """A column of numbers whose cells are already written."""
    return Filled(column=Heading(label=label, unit=unit, definition=definition), cells=tuple(values))


def durations(
    label: str,
    values: Sequence[float | None],
    *,
    definition: str = "",
    reason: str = "not known",
    largest: float | None = None,
) -> Filled:
    """A column of times given in µs, in the unit and with the decimals that suit ``largest``, else its own largest."""
    return _quantities(label, values, TIME_UNITS, definition, reason, largest)


def sizes(label: str, values: Sequence[float | None], *, definition: str = "", reason: str = "not known") -> Filled:
    """A column of sizes given in bytes, all in one unit."""
    return _quantities(label, values, BYTE_UNITS, definition, reason, None)


def absent(reason: str) -> Cell:
    """A cell without a value, which says why."""
    return Cell(text=ABSENT, reason=reason)


def written(text: str, value: float | None, reason: str) -> Cell:
    """A cell that reads ``text`` and sorts by ``value``; absent where there is no value."""
    return Cell(text=text, order=value) if known(value) else absent(reason)


def _quantities(
    label: str,
    values: Sequence[float | None],
    units: tuple[ScaledUnit, ...],
    definition: str,
    reason: str,
    largest: float | None,
) -> Filled:
    if largest is None:
        largest = max((abs(value) for value in values if known(value)), default=0.0)
    chosen = unit_for(largest, units)
    cells = tuple(
        Cell(text=in_unit(value, chosen, largest), order=value) if known(value) else absent(reason) for value in values
    )
    column = Heading(label=label, unit=chosen.name, definition=definition, held=units[0].name)
    return Filled(column=column, cells=cells)


def in_unit(value: float, unit: ScaledUnit, largest: float) -> str:
    """``value`` in ``unit`` with the decimals that give a column's ``largest`` value four digits.

    All of a column's numbers so have the same decimals and line up; one too small to show reads ``<0.01``.
    """
    top = abs(largest) / unit.size
    decimals = 0 if top >= 1000 else 1 if top >= 100 else 2 if top >= 10 else 3
    smallest = 10.0**-decimals
    scaled = value / unit.size
    if scaled == 0:
        return "0"
    if abs(scaled) < smallest / 2:
        return f"{'<' if scaled > 0 else '>-'}{smallest:.{decimals}f}"
    return f"{scaled:,.{decimals}f}"
