"""The job that failed, on the page and in the terminal: which rank ended first and why, who failed in consequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from perfscope.reports import tables
from perfscope.reports.tables import HtmlTable
from perfscope.results.ending.crash import Crash
from perfscope.results.summary import Summary

_LINES: Final = 6
"""Ranks in the terminal."""


def values(summary: Summary) -> dict[str, Any]:
    """What the template shows; ``crash`` is None where the job did not fail."""
    crash = summary.crash
    return {"crash": None if crash is None else {"ends": _ends(crash)}}


def terminal_lines(crash: Crash) -> Iterator[str]:
    """The ranks that failed in consequence, for a terminal or Markdown: each line may be broken."""
    others = [end for end in crash.ends if not end.is_cause]
    for end in others[:_LINES]:
        yield f"  rank {end.rank} in consequence: {end.in_words()}"
    if len(others) > _LINES:
        yield f"  … and {len(others) - _LINES} more ranks in the report"


def _ends(crash: Crash) -> HtmlTable:
    rows = crash.ends
    columns = [
        tables.ranks("Rank", [row.rank for row in rows]),
        tables.words("", ["cause" if row.is_cause else "in consequence" for row in rows]),
        tables.words("How it ended", [row.in_words() for row in rows]),
        tables.words("Raised in", [f"{row.function} ({row.file}:{row.line})" if row.file else "" for row in rows]),
        tables.column("Steps", [row.steps for row in rows], "{:,}".format),
        tables.column("Exit code", [row.exit_code for row in rows], str),
        tables.words("At", [row.ended_at or "" for row in rows]),
    ]
    return tables.table("crash-ends", "Ranks that failed", columns, "Those of the cause first.")
