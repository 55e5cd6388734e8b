"""A table as the page shows it: cells that know their text, what they sort by and, where empty, why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfscope.reports.format import ABSENT, BYTE_UNITS, TIME_UNITS, Unit, in_unit, known, unit_for


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
class Column:
    """A column's heading."""

    label: str
    unit: str = ""
    definition: str = ""
    """Key of the glossary."""
    numeric: bool = True
    """Right-aligned, in figures of equal width."""
    held: str = ""
    """Unit in which ``Cell.order`` is held where it is not ``unit``: for what is saved as CSV."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table; the first column of a row is its heading."""

    name: str
    """Unique on the page: its id."""
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    reading: str = ""
    """The caption: how to read it and what it shows here."""


@dataclass(frozen=True, kw_only=True)
class Filled:
    """A column together with its cells."""

    column: Column
    cells: tuple[Cell, ...]


def table(name: str, title: str, columns: Sequence[Filled], reading: str = "") -> Table:
    """Put columns of equal length side by side."""
    return Table(
        name=name,
        title=title,
        columns=tuple(filled.column for filled in columns),
        rows=tuple(zip(*(filled.cells for filled in columns), strict=True)),
        reading=reading,
    )


def words(label: str, values: Sequence[str], *, definition: str = "", reason: str = "not recorded") -> Filled:
    """A column of text; an empty string is an absent value."""
    return Filled(
        column=Column(label=label, definition=definition, numeric=False),
        cells=tuple(Cell(text=value, order=value) if value else absent(reason) for value in values),
    )


def ranks(label: str, values: Sequence[int | None]) -> Filled:
    """A column of rank numbers."""
    return Filled(
        column=Column(label=label),
        cells=tuple(
            absent("the rank is not known") if value is None else Cell(text=str(value), order=value) for value in values
        ),
    )


def numbers(label: str, values: Sequence[Cell], *, unit: str = "", definition: str = "") -> Filled:
    """A column of numbers whose cells are already written."""
    return Filled(column=Column(label=label, unit=unit, definition=definition), cells=tuple(values))


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
    units: tuple[Unit, ...],
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
    column = Column(label=label, unit=chosen.name, definition=definition, held=units[0].name)
    return Filled(column=column, cells=cells)
