"""A summary in a notebook's cell: the verdict in a few lines, and where to go on."""

from __future__ import annotations

from perfscope.reports.html import environment
from perfscope.reports.page import overview
from perfscope.results.categories import TimeCategory
from perfscope.results.summary import Summary
from perfscope.results.time_breakdown import shares
from perfscope.text import duration, percent

_VISIBLE_SHARE = 0.01
"""Smaller parts of the step are left out."""


def render(summary: Summary) -> str:
    """The verdict as a fragment of HTML; everything that came from a recording is escaped."""
    taken = shares(summary.time_breakdown)
    shown = [category for category in TimeCategory if taken[category.id] >= _VISIBLE_SHARE]
    return (
        environment()
        .get_template("notebook.html")
        .render(
            verdict=summary.verdict,
            identity=overview.identity(summary),
            step_time=duration(summary.job.step_time_us),
            parts=[(category.label, percent(taken[category.id])) for category in shown],
        )
    )
