"""Numbers and names as a reader sees them: units that adapt, three significant digits, never ``None`` or ``nan``."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeGuard

ABSENT: Final = "–"
"""Stands where the data cannot support a number; the reason is one hover away."""


def known(value: float | None) -> TypeGuard[float]:
    """True for a number that can be shown: neither None nor nan nor infinite."""
    return value is not None and math.isfinite(value)


def significant(value: float) -> str:
    """A number with three significant digits, thousands separated: 0.0123, 1.35, 83.2, 835, 12,345."""
    if not math.isfinite(value):
        return ABSENT
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    # The digit count of the rounded value, so that 9.996 reads 10.0 and not 10.00.
    decimals = 2 - math.floor(math.log10(float(f"{size:.2e}")))
    return f"{value:.{decimals}f}" if decimals <= 5 else f"{value:.2e}"


@dataclass(frozen=True)
class Unit:
    """A unit and how many of the base unit (µs, bytes …) it holds."""

    name: str
    size: float


TIME_UNITS: Final = (Unit("µs", 1.0), Unit("ms", 1e3), Unit("s", 1e6))
BYTE_UNITS: Final = (
    Unit("B", 1.0),
    Unit("KiB", 2.0**10),
    Unit("MiB", 2.0**20),
    Unit("GiB", 2.0**30),
    Unit("TiB", 2.0**40),
)
_COUNT_UNITS: Final = (Unit("", 1.0), Unit("k", 1e3), Unit("M", 1e6), Unit("B", 1e9), Unit("T", 1e12))
_FLOP_UNITS: Final = tuple(
    Unit(f"{prefix}FLOP", 10.0**power)
    for prefix, power in (("", 0), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18))
)


def unit_for(largest: float, units: tuple[Unit, ...] = TIME_UNITS) -> Unit:
    """The largest unit in which ``largest`` still reads as at least 1 after rounding to three digits."""
    chosen = units[0]
    for unit in units[1:]:
        if abs(largest) >= unit.size * 0.9995:
            chosen = unit
    return chosen


def duration(us: float | None) -> str:
    """A time given in µs: ``412 µs``, ``83.2 ms``, ``1.35 s``."""
    return _with_unit(us, TIME_UNITS)


def byte_size(count: float | None) -> str:
    """A size given in bytes: ``512 B``, ``25.0 MiB``."""
    return _with_unit(count, BYTE_UNITS)


def count(value: float | None) -> str:
    """A count as models are named: ``512``, ``124 M``, ``6.74 B`` (10⁹)."""
    return _with_unit(value, _COUNT_UNITS)


def flop(value: float | None) -> str:
    """A number of floating-point operations: ``1.35 PFLOP``."""
    return _with_unit(value, _FLOP_UNITS)


def share(fraction: float | None) -> str:
    """A fraction as a percentage: 0.254 reads ``25%``, 0.034 ``3.4%``; what is not nothing never reads 0."""
    # The percentage, too, has to be finite: a fraction near the largest float overflows on the way.
    percent = math.nan if fraction is None else fraction * 100
    if not math.isfinite(percent):
        return ABSENT
    if percent == 0:
        return "0%"
    if abs(percent) < 0.1:
        return "<0.1%" if percent > 0 else ">-0.1%"
    return f"{percent:,.0f}%" if abs(percent) >= 9.95 else f"{percent:.1f}%"


def in_unit(value: float, unit: Unit, largest: float) -> str:
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


def plural(number: int, noun: str, many: str = "") -> str:
    """``1 rank``, ``1,024 ranks``."""
    return f"{number:,} {noun if number == 1 else many or noun + 's'}"


def rank_list(ranks: Iterable[int], limit: int = 8) -> str:
    """Ranks as runs: ``0–3, 7``; beyond ``limit`` runs the rest is counted."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    written = [_run(first, last) for first, last in runs[:limit]]
    rest = sum(last - first + 1 for first, last in runs[limit:])
    return ", ".join(written) + (f" and {rest:,} more" if rest else "")


def ranks_named(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0–3, 7``."""
    listed = sorted(set(ranks))
    return f"{'rank' if len(listed) == 1 else 'ranks'} {rank_list(listed)}"


def measure(value: float, unit: str) -> str:
    """A number of evidence in the unit that the rule gave it."""
    if not math.isfinite(value):
        return ABSENT
    factors = {"ns": 1e-3, "us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}
    if unit in factors:
        return duration(value * factors[unit])
    if unit in {"share", "fraction"}:
        return share(value)
    if unit in {"bytes", "B"}:
        return byte_size(value)
    if unit in {"ratio", "x", "×"}:
        return f"{significant(value)}×"
    number = f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else significant(value)
    return f"{number} {unit}".strip()


def printable(text: str) -> str:
    """``text`` on one line, without control characters, so that a name from a trace cannot drive a terminal."""
    return "".join(" " if unicodedata.category(letter) in {"Cc", "Cf", "Zl", "Zp"} else letter for letter in text)


def _run(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first}, {last}" if last == first + 1 else f"{first}–{last}"


def _with_unit(value: float | None, units: tuple[Unit, ...]) -> str:
    if value is None or not math.isfinite(value):
        return ABSENT
    unit = unit_for(value, units)
    if unit.size == 1 and value == int(value):
        return f"{int(value)} {unit.name}".strip()
    return f"{significant(value / unit.size)} {unit.name}".strip()
