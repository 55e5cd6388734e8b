"""The page of a comparison: one self-contained HTML file, rendered from a ``Comparison`` alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from perfscope.reports.compare import pictures, words
from perfscope.reports.compare.tables import breakdown_table, difference_tables, scaling_table, settings_table
from perfscope.reports.html import assembled, save
from perfscope.reports.page.definitions import DEFINITIONS
from perfscope.results.categories import TimeCategory
from perfscope.results.comparison import Comparison, Difference

_SCRIPTS: Final = ("tooltips.js", "tables.js", "copy.js", "theme.js")
_STYLES: Final = ("page.css", "comparison.css")

MORE_DEFINITIONS: Final[dict[str, tuple[str, str]]] = {
    "significant": (
        "Significant",
        (
            "More than noise: the range of the change excludes 0. The range is the 99% confidence interval of the "
            "difference of the means (Welch's test; over all categories of the time breakdown together), at least the "
            "floor, by which runs of the same job differ anyway. A lone odd step is left out."
        ),
    ),
    "noise": (
        "Noise",
        (
            "A difference of the step times must exceed this: half the width of its 99% confidence interval, at least "
            "the floor."
        ),
    ),
    "efficiency": (
        "Scaling efficiency",
        "Work per second and device / that of the run with the fewest devices; 100% is perfect scaling.",
    ),
    "scaling_kind": (
        "Weak and strong scaling",
        (
            "Weak scaling: the same work per device and step as in the smallest run. Strong scaling: the same work per "
            "step of all devices together. Mixed: neither."
        ),
    ),
    "realised": ("Realised", "Measured change / predicted change of the step time."),
}
"""Definitions that only this page needs."""


def render(comparison: Comparison) -> str:
    """The whole page as HTML."""
    return "".join(_parts(comparison))


def write(comparison: Comparison, path: Path) -> None:
    """Write the page, whole or not at all. Raises OSError when the folder cannot be written."""
    save(_parts(comparison), path)


def _parts(comparison: Comparison) -> Iterator[str]:
    return assembled("comparison.html", _values(comparison), styles=_STYLES, scripts=_SCRIPTS)


def _values(comparison: Comparison) -> dict[str, Any]:
    return {
        "comparison": comparison,
        "tone": words.tone(comparison),
        "title": words.title(comparison),
        "identities": [words.identity(run) for run in comparison.runs],
        "several": len(comparison.differences) > 1,
        "bars": pictures.run_bars(comparison.runs),
        "categories": TimeCategory,
        "shown_rows": {segment.name for bar in pictures.run_bars(comparison.runs) for segment in bar.segments},
        "between": words.BETWEEN,
        "dots": pictures.dots((*comparison.runs, *comparison.baselines)),
        "scaling": scaling_table(comparison, comparison.scaling) if comparison.scaling else None,
        "scaling_sentences": words.scaled(comparison.scaling) if comparison.scaling else [],
        "parts": [
            _part(comparison, difference, "" if len(comparison.differences) == 1 else f"-{number}")
            for number, difference in enumerate(comparison.differences, start=1)
        ],
        "definitions": {**DEFINITIONS, **MORE_DEFINITIONS},
    }


def _part(comparison: Comparison, difference: Difference, suffix: str) -> dict[str, Any]:
    """Everything about one candidate."""
    return {
        "suffix": suffix,
        "difference": difference,
        "label": comparison.runs[difference.candidate].label,
        "headline": words.headline(comparison, difference),
        "because": words.because(difference),
        "changed": words.changed(difference),
        "certainty": words.certainty(difference),
        "predictions": [(check, words.prediction(check, difference.step)) for check in difference.predictions],
        "tiles": pictures.tiles(difference),
        "deltas": pictures.deltas(difference),
        "breakdown": breakdown_table(difference, suffix),
        "settings": settings_table(difference, suffix),
        "tables": difference_tables(difference, suffix),
    }
