"""A table as the page shows it: cells that know their text, what they sort by and, where empty, why.

Of many rows that are alike, the page shows those that differ and one for the rest (``collapsed``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from statistics import median, quantiles
from typing import Final, TypeVar

from perfscope.frozen import dataclass
from perfscope.text import ABSENT, BYTE_UNITS, TIME_UNITS, ScaledUnit, known, plural, unit_for

EACH_SHOWN: Final = 16
"""Of more rows those that differ are shown; the table of all of them is folded."""

OUTLYING_SHOWN: Final = 12
"""Rows that differ, at most."""

_DIFFERENT: Final = 0.05
"""Share of its column's median by which a number must differ from it."""

_SPREADS: Final = 4
"""And by this many times the range of the middle half of the column."""

_FEW_TEXTS: Final = 3
"""A column with more texts names things: rows do not differ by it."""

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
    short: tuple[tuple[Cell, ...], ...] = ()
    """The rows that differ, and one for all others of their kind; empty where each row is shown."""


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


def collapsed(
    table: HtmlTable,
    noun: str = "rank",
    *,
    named: int = 0,
    by: Collection[int] = (),
    most: int = EACH_SHOWN,
    marked: Collection[str] = (),
) -> HtmlTable:
    """The table, with ``short`` rows where more than ``most`` are of one kind: those that differ, and one for the rest.

    Rows are of one kind whose texts in the columns ``by`` are the same. The column ``named`` has the name of a row's
    ``noun``; rows whose name is ``marked``, the stragglers, are shown whether they differ or not.
    """
    kinds: dict[tuple[str, ...], list[tuple[Cell, ...]]] = {}
    for row in table.rows:
        kinds.setdefault(tuple(row[column].text for column in by), []).append(row)
    if not any(len(rows) > most for rows in kinds.values()):
        return table
    short: list[tuple[Cell, ...]] = []
    for rows in kinds.values():
        short += _differing(rows, table.columns, noun, named, marked) if len(rows) > most else rows
    return replace(table, short=tuple(short))


def _differing(
    rows: Sequence[tuple[Cell, ...]], columns: Sequence[Heading], noun: str, named: int, marked: Collection[str]
) -> list[tuple[Cell, ...]]:
    """The rows that differ most, and last the most usual one under the name of all others."""
    distances = _distances(rows, columns, named)
    usual = min(range(len(rows)), key=distances.__getitem__)
    is_marked = [row[named].text in marked for row in rows]
    differing = [at for at in range(len(rows)) if at != usual and (is_marked[at] or distances[at] > 1)]
    differing.sort(key=lambda at: (not is_marked[at], -distances[at]))
    shown = differing[:OUTLYING_SHOWN]
    name = rows[usual][named].text
    others = f"{'other ' if shown else ''}{noun}"
    rest = plural(len(rows) - len(shown), others) + (", like " if shown == differing else ", among them ")
    rest += f"rank {name}" if noun == "rank" else name
    texts = {at: f"{rows[at][named].text}, straggler" for at in shown if is_marked[at]} | {usual: rest}
    return [
        tuple(
            Cell(text=texts[at], order=cell.order) if place == named and at in texts else cell
            for place, cell in enumerate(rows[at])
        )
        for at in (*shown, usual)
    ]


def _distances(rows: Sequence[tuple[Cell, ...]], columns: Sequence[Heading], named: int) -> list[float]:
    """How far each row is from the middle of the others, in its farthest column; beyond 1 it differs."""
    distances = [0.0] * len(rows)
    for at, column in enumerate(columns):
        if at == named:
            continue
        cells = [row[at] for row in rows]
        for place, distance in enumerate(_from_middle(cells) if column.numeric else _from_common(cells)):
            distances[place] = max(distances[place], distance)
    return distances


def _from_middle(cells: Sequence[Cell]) -> Iterator[float]:
    values = [cell.order for cell in cells if isinstance(cell.order, int | float)]
    if len(values) < 2:
        yield from (0.0 for _ in cells)
        return
    middle = median(values)
    low, _, high = quantiles(values, n=4)
    usual = max(_SPREADS * (high - low), _DIFFERENT * abs(middle)) or math.ulp(1.0)
    for cell in cells:
        yield abs(cell.order - middle) / usual if isinstance(cell.order, int | float) else 0.0


def _from_common(cells: Sequence[Cell]) -> Iterator[float]:
    counted = Counter(cell.text for cell in cells)
    common = counted.most_common(1)[0][0]
    for cell in cells:
        yield 2.0 if len(counted) <= _FEW_TEXTS and cell.text != common else 0.0


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
