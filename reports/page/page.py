"""The page: one self-contained HTML file, rendered from a ``Summary`` alone.

Plotly and the figures are inside it, packed (gzip, base64); its scripts unpack them into a ``blob:`` that the page's
policy allows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from perfscope.execution.cache import Cache
from perfscope.recording.paths import MERGED_FILE
from perfscope.reports.figures.breakdown import HEATMAP_ABOVE
from perfscope.reports.figures.colours import dark_of_light
from perfscope.reports.figures.figures import Figures
from perfscope.reports.figures.timeline import first_shown
from perfscope.reports.html import assembled, kept, save
from perfscope.reports.page import (
    advice,
    breakdown,
    charts,
    communication,
    crash,
    evidence,
    gaps,
    hang,
    kernels,
    memory,
    overview,
    pipeline,
    roles,
    run_history,
    snapshots,
    system,
    tiles,
    timeline,
)
from perfscope.reports.page.definitions import DEFINITIONS
from perfscope.results import file
from perfscope.results.categories import TimeCategory
from perfscope.results.summary import Summary
from perfscope.results.time_breakdown import shares
from perfscope.text import ABSENT, of_recording, percent

_SCRIPTS: Final = (
    "unpack.js",
    "tooltips.js",
    "tables.js",
    "copy.js",
    "theme.js",
    "charts.js",
    "timeline.js",
    "keyboard.js",
)
"""In the order in which they run."""

TOP_FINDINGS: Final = 5
"""Findings listed under the verdict; the rest is further down."""


def render(summary: Summary, *, merged: str = "") -> str:
    """The whole page as HTML; ``merged`` is the job's file for Perfetto, from the page's folder, where there is one."""
    return "".join(_parts(summary, merged=merged))


def _parts(summary: Summary, *, merged: str) -> Iterator[str]:
    values = _values(summary)
    if summary.is_one_window:
        values = {name: _of_recording(value) for name, value in values.items()}
    values |= {"plotly": _plotly(), "merged": merged}
    return assembled("page.html", values, styles=("page.css",), scripts=_SCRIPTS, sources=("blob:",))


def write(summary: Summary, path: Path) -> None:
    """Write the page, whole or not at all. Raises OSError when the folder cannot be written."""
    save(_parts(summary, merged=MERGED_FILE if path.with_name(MERGED_FILE).is_file() else ""), path)


def _values(summary: Summary) -> dict[str, Any]:
    """Everything the template shows, worked out; the template itself decides nothing but layout."""
    rows, job = summary.time_breakdown, summary.job
    taken, figures = shares(rows), summary.figures
    cards = advice.cards(summary)
    # Ranks without a trace left step times or dumps alone: there is no time breakdown and no communication.
    traced = bool(rows) or not job.ranks
    return {
        "summary": summary,
        "traced": traced,
        "advised": bool(cards) or (traced and summary.hang is None and summary.crash is None),
        "evidenced": traced or summary.history is not None,
        "communicates": bool(
            summary.collectives or "overlap" in figures or (rows and job.world_size != 1 < len(job.ranks))
        ),
        "window": "The recording" if summary.is_one_window else "One step",
        "verdict": summary.verdict,
        "identity": overview.identity(summary),
        "command": overview.command(job),
        "facts": overview.facts(summary),
        "tiles": tiles.tiles(summary),
        "certainty": overview.certainty(summary),
        "mean_step": [(c, taken[c.id], percent(taken[c.id])) for c in TimeCategory if taken[c.id] >= 0.0005],
        "cards": cards,
        "plan": advice.plan_sentence(summary),
        "plan_command": advice.whatif_command(summary.plan.whatif, summary) if summary.plan else "",
        "since": overview.since(summary),
        "top_findings": TOP_FINDINGS,
        "legend": breakdown.legend(rows),
        "breakdown_table": breakdown.breakdown_table(rows) if rows else ABSENT,
        "outlying": breakdown.outlying_table(summary),
        "named_host": breakdown.named_host_table(rows),
        "breakdown_reading": breakdown.breakdown_reading(summary),
        "is_heatmap": len(rows) > HEATMAP_ABOVE,
        "strips_reading": charts.strips_reading(summary),
        "steps_reading": charts.steps_reading(summary),
        "first_shown": first_shown(summary),
        "merge_command": timeline.merge_command(summary),
        "timeline_reading": timeline.timeline_reading(summary),
        "path_reading": charts.path_reading(summary),
        "history_reading": run_history.history_reading(summary),
        "stages": run_history.stages_table(summary),
        "run_stragglers": run_history.straggler_table(summary),
        "goodput": run_history.goodput_table(summary),
        "goodput_reading": run_history.goodput_reading(summary),
        "cost_reading": run_history.cost_reading(summary),
        "comparison": run_history.comparison(summary),
        "outliers": run_history.outlier_table(summary),
        "curves": charts.curves(summary),
        "overlap_reading": communication.overlap_reading(summary),
        "arrivals_reading": communication.arrivals_reading(summary),
        "bandwidth_reading": communication.bandwidth_reading(summary),
        "stragglers": evidence.stragglers_table(summary.stragglers, job.step_time_us) if summary.stragglers else ABSENT,
        "collectives": evidence.collectives_table(summary.collectives, len(job.steps))
        if summary.collectives
        else ABSENT,
        "inspected": communication.inspector_table(summary.inspector) if summary.inspector else None,
        "cost_model": evidence.cost_table(summary.cost_model) if summary.cost_model else ABSENT,
        "tables": evidence.evidence_tables(summary),
        "memory_reading": memory.memory_reading(summary),
        "system_reading": system.system_reading(summary),
        "system_tables": system.system_tables(summary),
        **kernels.values(summary),
        **pipeline.values(summary),
        **crash.values(summary),
        **hang.values(summary),
        **snapshots.values(summary),
        **roles.values(summary),
        "gaps": gaps.gaps(summary),
        "failures": gaps.failures_table(job.failures),
        "definitions": DEFINITIONS,
        "figures": figures.drawn,
        "packed_summary": file.embedded(summary),
        "packed_figures": file.packed(_drawn(figures)),
    }


def _of_recording(value: Any) -> Any:
    """What reports say (sentences, tables, tiles, cards), in words that name no step."""
    if isinstance(value, str):
        return of_recording(value)
    if isinstance(value, tuple):
        return tuple(map(_of_recording, value))
    if is_dataclass(value) and not isinstance(value, type) and type(value).__module__.startswith("perfscope.reports."):
        return replace(value, **{field.name: _of_recording(getattr(value, field.name)) for field in fields(value)})
    return value


def _drawn(figures: Figures) -> bytes:
    """The figures as JSON, and the colours that they have in the dark, as ``charts.js`` reads them."""
    return file.compact_json({"dark": dark_of_light(), "figures": figures.drawn})


@cache
def _plotly() -> str:
    """The script that the plotly package brings, packed: once, since that takes as long as the rest of the page."""
    plotly = importlib.util.find_spec("plotly")  # importing it takes longer than reading the file
    assert plotly is not None  # this package depends on it
    script = Path(str(plotly.origin)).parent / "package_data" / "plotly.min.js"
    return kept(script, lambda: _packed_plotly(script))


def _packed_plotly(script: Path) -> str:
    """From the cache, for those who may not write where this package is installed."""
    cached = Cache.from_environment()
    content = cached.content(script) if cached is not None else None
    if cached is None or content is None:
        return file.packed(script.read_bytes())
    name = f"{content.key}.gz.b64"
    packed = cached.load(name, lambda path: path.read_text(encoding="ascii"))
    if packed is None:
        packed = made = file.packed(script.read_bytes())
        cached.save(name, lambda path: path.write_text(made, encoding="ascii"))
    return packed
