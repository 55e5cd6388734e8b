"""Numbers as a person reads them: the one place that writes durations, sizes, percentages, counts and lists of ranks.

Every part of PerfScope uses it, also collectors inside the training job: it imports the standard library alone. Units
adapt to the value, three significant digits are shown, and no text contains ``None``, ``nan`` or ``inf``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from typing import Final, TypeGuard

from perfscope.frozen import dataclass

ABSENT: Final = "–"
"""Stands where the data cannot support a number."""


@dataclass(frozen=True)
class ScaledUnit:
    """A unit and how many of the base unit (µs, bytes …) it holds."""

    name: str
    size: float


TIME_UNITS: Final = (ScaledUnit("µs", 1.0), ScaledUnit("ms", 1e3), ScaledUnit("s", 1e6))
BYTE_UNITS: Final = (
    ScaledUnit("B", 1.0),
    ScaledUnit("KiB", 2.0**10),
    ScaledUnit("MiB", 2.0**20),
    ScaledUnit("GiB", 2.0**30),
    ScaledUnit("TiB", 2.0**40),
)
_SMALL: Final = 9.995e-4
"""The largest that reads 9.99e-04; what is larger reads 0.00100 and so on."""

_COUNT_UNITS: Final = (
    ScaledUnit("", 1.0),
    ScaledUnit("k", 1e3),
    ScaledUnit("M", 1e6),
    ScaledUnit("B", 1e9),
    ScaledUnit("T", 1e12),
)
_FLOP_UNITS: Final = tuple(
    ScaledUnit(f"{prefix}FLOP", 10.0**power)
    for prefix, power in (("", 0), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18))
)


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
    # Three digits of the rounded value, so that 9.996 reads 10.0 and not 10.00.
    return f"{value:#.3g}" if size > _SMALL else f"{value:.2e}"


def unit_for(largest: float, units: tuple[ScaledUnit, ...] = TIME_UNITS) -> ScaledUnit:
    """The largest unit in which ``largest`` still reads as at least 1 after rounding to three digits."""
    size, chosen = abs(largest), units[0]
    for unit in units:
        if not size >= unit.size * 0.9995:
            break
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


def percent(fraction: float | None) -> str:
    """A fraction as a percentage: 0.254 reads ``25%``, 0.034 ``3.4%``; what is not zero never reads 0."""
    # The percentage, too, has to be finite: a fraction near the largest float overflows on the way.
    value = math.nan if fraction is None else fraction * 100
    if not math.isfinite(value):
        return ABSENT
    if value == 0:
        return "0%"
    if abs(value) < 0.1:
        return "<0.1%" if value > 0 else ">-0.1%"
    # Nearly all is not all: 99.7% beside 0.3%.
    whole = abs(value) >= 9.95 and not 99.5 <= abs(value) < 99.95
    return f"{value:,.0f}%" if whole else f"{value:.1f}%"


def factor(value: float | None) -> str:
    """A ratio: ``1.04x``, ``1.3x``, ``2.6x``, ``12x``. It has two decimals below 2, where the part above 1 is small."""
    if not known(value):
        return ABSENT
    size = abs(value)
    if size < 0.1:
        return f"{significant(value)}x"
    written = f"{value:.2f}" if size < 1.995 else f"{value:.1f}" if size < 9.95 else f"{value:,.0f}"
    return f"{written.rstrip('0').rstrip('.') if '.' in written else written}x"


def count_per_step(value: float) -> str:
    """A mean count: ``12``, ``1,234``; with three significant digits where it is not whole: ``24.7``."""
    return f"{value:,.0f}" if value == round(value) else significant(value)


def plural(number: int, noun: str, many: str = "") -> str:
    """``1 rank``, ``1,024 ranks``."""
    return f"{number:,} {noun if number == 1 else many or noun + 's'}"


def lower_first(sentence: str) -> str:
    """A sentence that goes on after a colon; a first word with capitals of its own (DDP, NCCL) keeps them."""
    word = sentence.partition(" ")[0]
    return sentence if word[1:] != word[1:].lower() else sentence[:1].lower() + sentence[1:]


def rank_list(ranks: Iterable[int], limit: int = 8) -> str:
    """Ranks, or steps, in ranges: ``0-3, 7``, at an even distance ``0-56 by 8``; beyond ``limit`` ranges the rest is
    counted: ``0, 2, 3, 5 and 12 more``.
    """
    numbers = sorted(set(ranks))
    distances = {after - before for before, after in itertools.pairwise(numbers)}
    if len(numbers) > 4 and len(distances) == 1 and (distance := distances.pop()) > 1:
        return f"{numbers[0]}-{numbers[-1]} by {distance}"
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    rest = sum(last - first + 1 for first, last in runs[limit:])
    return ", ".join(_run(first, last) for first, last in runs[:limit]) + (f" and {rest:,} more" if rest else "")


def ranks_in_words(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-3, 7``."""
    numbers = set(ranks)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {rank_list(numbers)}"


def _run(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first}, {last}" if last == first + 1 else f"{first}-{last}"


def _with_unit(value: float | None, units: tuple[ScaledUnit, ...]) -> str:
    if value is None or not math.isfinite(value):
        return ABSENT
    unit = unit_for(value, units)
    if unit.size == 1 and value == int(value):
        return f"{int(value)} {unit.name}".strip()
    return f"{significant(value / unit.size)} {unit.name}".strip()


def printable(text: str) -> str:
    """``text`` on one line, without control characters, so that a name from a trace cannot drive a terminal."""
    if text.isprintable():
        return text
    import unicodedata

    return "".join(" " if unicodedata.category(letter) in {"Cc", "Cf", "Zl", "Zp"} else letter for letter in text)


_OF_STEPS: Final = (
    (
        re.compile(r"\b([Oo]f|[Dd]uring|[Ii]n) (?:the|each|every|its|a|one) (?:mean )?step\b(?! time)"),
        r"\1 the recording",
    ),
    (re.compile(r"'s mean step\b"), "'s recording"),
    (re.compile(r"\bof the recorded step\b"), "of the recording"),
    (re.compile(r"\bthe step (takes|waits)\b"), r"the recording \1"),
    (re.compile(r"\bthe step's start\b"), "the start of the recording"),
    (re.compile(r"\b(the|its) step time\b"), r"\1 length of the recording"),
    (re.compile(r"\b(per|each) step of\b"), "of"),
    (re.compile(r",? (?:mean )?per step\b"), ""),
    (re.compile(r"\bper rank and step\b"), "per rank"),
    (re.compile(r"\bOne step of\b"), "The recording of"),
    (re.compile(r"\bPer step\b"), "Time"),
    (re.compile(r"\b(add up to|shorten) the step\b"), r"\1 the recording"),
    (re.compile(r"\bthis step's\b"), "this"),
    (re.compile(r"^Step$"), "Recording"),
)


def of_recording(text: str) -> str:
    """``text`` about a step, said of a recording in which no steps were found."""
    for pattern, said in _OF_STEPS:
        text = pattern.sub(said, text)
    return text
