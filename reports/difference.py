"""The page of a comparison: one self-contained HTML file, rendered from a ``Comparison`` alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from perfscope.comparison import Comparison, Difference
from perfscope.reports import difference_pictures as pictures
from perfscope.reports import difference_words as words
from perfscope.reports import page
from perfscope.reports.categories import CATEGORIES
from perfscope.reports.definitions import DEFINITIONS
from perfscope.reports.difference_tables import account_table, difference_tables, scaling_table, settings_table

_SCRIPTS: Final = ("tooltips.js", "tables.js", "copy.js")
_STYLES: Final = ("page.css", "difference.css")

MORE_DEFINITIONS: Final[dict[str, tuple[str, str]]] = {
    "beyond_noise": (
        "Beyond noise",
        (
            "The change is more than chance: Welch's test of the means or Yuen's of the typical steps finds it with "
            "less than 1% risk of a false alarm (over all rows of the account together), and it exceeds the floor "
            "below which starts of one job differ anyway."
        ),
    ),
    "noise": (
        "Noise",
        (
            "What a difference of the mean step times must exceed: half of its 99% confidence interval, at least the "
            "floor."
        ),
    ),
    "efficiency": (
        "Scaling efficiency",
        "Work per second and device over that of the run with the fewest devices; 100% is perfect scaling.",
    ),
    "scaling_kind": (
        "Weak and strong scaling",
        (
            "Weak: every device does as much work in a step as in the smallest run. Strong: all devices together do. "
            "Mixed: neither."
        ),
    ),
    "realised": ("Realised", "Measured saving ÷ predicted saving of the step time."),
}
"""Terms that only this page has."""


def render(comparison: Comparison) -> str:
    """The whole page as HTML."""
    return page.assemble("difference.html", _values(comparison), styles=_STYLES, scripts=_SCRIPTS)


def write(comparison: Comparison, path: Path) -> None:
    """Write the page, whole or not at all. Raises OSError when the folder cannot be written."""
    page.save(render(comparison), path)


def _values(comparison: Comparison) -> dict[str, Any]:
    return {
        "comparison": comparison,
        "tone": words.tone(comparison),
        "title": words.title(comparison),
        "identities": [words.identity(run) for run in comparison.runs],
        "several": len(comparison.differences) > 1,
        "bars": pictures.run_bars(comparison.runs),
        "categories": CATEGORIES,
        "shown_rows": {segment.name for bar in pictures.run_bars(comparison.runs) for segment in bar.segments},
        "between": words.BETWEEN,
        "dots": pictures.dots((*comparison.runs, *comparison.baselines)),
        "scaling": scaling_table(comparison, comparison.scaling) if comparison.scaling else None,
        "scaling_sentences": [
            words.scaled(row)
            for row in (comparison.scaling.rows if comparison.scaling else ())
            if row.kind not in ("base", "same")
        ],
        "parts": [
            _part(comparison, difference, "" if len(comparison.differences) == 1 else f"-{number}")
            for number, difference in enumerate(comparison.differences, start=1)
        ],
        "definitions": {**DEFINITIONS, **MORE_DEFINITIONS},
    }


def _part(comparison: Comparison, difference: Difference, suffix: str) -> dict[str, Any]:
    """Everything about one run against the first."""
    return {
        "suffix": suffix,
        "difference": difference,
        "label": comparison.runs[difference.after].label,
        "headline": words.headline(comparison, difference),
        "because": words.because(difference),
        "changed": words.changed(difference),
        "certainty": words.certainty(difference),
        "predictions": [(tried, words.prediction(tried)) for tried in difference.tried],
        "tiles": pictures.tiles(difference),
        "deltas": pictures.deltas(difference),
        "account": account_table(difference, suffix),
        "settings": settings_table(difference, suffix),
        "tables": difference_tables(difference, suffix),
    }
