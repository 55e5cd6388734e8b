"""One check of the acceptance run, and the table of all."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Point:
    """What was checked. ``holds`` is None where it could not be: ``found`` then says why."""

    area: str
    what: str
    expected: str
    found: str
    holds: bool | None

    def row(self) -> str:
        """A line of the table."""
        verdict = {True: "yes", False: "**no**", None: "skipped"}[self.holds]
        cells = (self.area, self.what, self.expected, self.found, verdict)
        return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


HEAD = "| area | checked | expected | found | holds |\n|---|---|---|---|---|"


def near(area: str, what: str, expected: float, found: float | None, share: float, unit: str = "") -> Point:
    """Is ``found`` within ``share`` of ``expected``?"""
    if found is None:
        return Point(area, what, f"{expected:.4g}{unit} ± {share:.1%}", "nothing", holds=False)
    off = f" ({found / expected - 1:+.1%})" if expected else ""
    holds = abs(found - expected) <= share * abs(expected)
    return Point(area, what, f"{expected:.4g}{unit} ± {share:.1%}", f"{found:.4g}{unit}{off}", holds)


def between(area: str, what: str, low: float, found: float | None, high: float, unit: str = "") -> Point:
    """Is ``found`` in [``low``, ``high``]?"""
    shown = "nothing" if found is None else f"{found:.4g}{unit}"
    holds = found is not None and low <= found <= high
    return Point(area, what, f"{low:.4g} to {high:.4g}{unit}", shown, holds)


def says(area: str, what: str, expected: str, found: str, *, holds: bool) -> Point:
    """A check of words."""
    return Point(area, what, expected, found[:300], holds)


def skipped(area: str, what: str, why: str) -> Point:
    """A check that cannot be made here."""
    return Point(area, what, "", why, holds=None)


def guarded(area: str, checks: Callable[[], Iterable[Point]]) -> Iterator[Point]:
    """The checks' points. An error in them is a point that does not hold, and the other areas go on."""
    try:
        yield from checks()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        shown = f"{type(error).__name__}: {error} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
        yield Point(area, "the checks run to their end", "no error", shown[-600:], holds=False)
