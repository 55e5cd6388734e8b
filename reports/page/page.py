"""The page: one self-contained HTML file, rendered from a ``Summary`` alone.

The file loads nothing: style, scripts, plotly and data are inside it, the last two packed (gzip, base64). Its content
security policy allows only the scripts whose hashes it names, and those that these make themselves (``blob:``, for the
unpacked plotly): even a name from a trace that slipped past the escaping could not run or fetch anything.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import json
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

import jinja2

from perfscope.errors import PerfscopeError
from perfscope.execution.cache import Cache
from perfscope.recording.paths import partial
from perfscope.reports.page import (
    advice,
    breakdown,
    charts,
    communication,
    evidence,
    gaps,
    kernels,
    memory,
    overview,
    pipeline,
    run_history,
    system,
    tiles,
    timeline,
)
from perfscope.reports.page.definitions import DEFINITIONS
from perfscope.results.categories import TimeCategory
from perfscope.results.summary import Summary
from perfscope.results.time_breakdown import shares
from perfscope.text import ABSENT, percent

_SCRIPTS: Final = (
    "unpack.js",
    "tooltips.js",
    "tables.js",
    "copy.js",
    "drawing.js",
    "figures.js",
    "figures_step.js",
    "figures_communication.js",
    "charts.js",
)
"""In the order in which they run."""

_NUMBER_AND_UNIT: Final = re.compile(r"(\d) (%|[mµ]?s\b|[KMGT]?i?B\b|[MGT]B/s|TFLOP)")

TOP_FINDINGS: Final = 5
"""Findings listed under the verdict; the rest is further down."""


def render(summary: Summary) -> str:
    """The whole page as HTML."""
    scripts = tuple(_asset(name) for name in _SCRIPTS)
    return (
        _environment()
        .get_template("page.html")
        .render(
            **_values(summary),
            style=_asset("page.css"),
            plotly=_plotly(),
            scripts=scripts,
            policy=_policy(scripts, "blob:"),
        )
    )


def write(summary: Summary, path: Path) -> None:
    """Write the page, whole or not at all. Raises OSError when the folder cannot be written."""
    save(render(summary), path)


def assemble(template: str, values: dict[str, Any], *, styles: tuple[str, ...], scripts: tuple[str, ...]) -> str:
    """A page of another kind, self-contained as this one is: ``styles`` and ``scripts`` are names in ``assets``."""
    texts = tuple(_asset(name) for name in scripts)
    style = "\n".join(_asset(name) for name in styles)
    return _environment().get_template(template).render(**values, style=style, scripts=texts, policy=_policy(texts))


def save(html: str, path: Path) -> None:
    """Write a page, whole or not at all. Raises OSError when the folder cannot be written."""
    temporary = partial(path)
    # A name from a trace may hold half a surrogate pair, which UTF-8 cannot write.
    temporary.write_text(html, encoding="utf-8", errors="replace", newline="\n")
    temporary.replace(path)


def _values(summary: Summary) -> dict[str, Any]:
    """Everything the template shows, worked out; the template itself decides nothing but layout."""
    rows, job = summary.time_breakdown, summary.job
    taken, data = shares(rows), charts.chart_data(summary)
    return {
        "summary": summary,
        # Of a recording of step times alone there is no time breakdown and no communication.
        "traced": bool(rows) or summary.history is None,
        "verdict": summary.verdict,
        "identity": overview.identity(summary),
        "command": overview.command(job),
        "facts": overview.facts(summary),
        "tiles": tiles.tiles(summary),
        "certainty": overview.certainty(summary),
        "mean_step": [(c, taken[c.id], percent(taken[c.id])) for c in TimeCategory if taken[c.id] >= 0.0005],
        "cards": advice.cards(summary),
        "plan": advice.plan_sentence(summary),
        "plan_command": advice.whatif_command(summary.plan.whatif, summary.source) if summary.plan else "",
        "since": overview.since(summary),
        "top_findings": TOP_FINDINGS,
        "legend": breakdown.legend(rows),
        "breakdown_table": breakdown.breakdown_table(rows) if rows else ABSENT,
        "named_host": breakdown.named_host_table(rows),
        "breakdown_reading": breakdown.breakdown_reading(summary),
        "is_heatmap": len(rows) > breakdown.HEATMAP_ABOVE,
        "strips": charts.shown_strips(summary),
        "strips_reading": charts.strips_reading(summary),
        "steps_reading": charts.steps_reading(summary),
        "has_curve": any(series["curve"] for series in (data["bandwidth"] or {"series": ()})["series"]),
        "timeline_reading": timeline.timeline_reading(summary),
        "path_reading": charts.path_reading(summary),
        "history_reading": run_history.history_reading(summary),
        "outliers": run_history.outlier_table(summary),
        "curves": charts.curves(summary),
        "overlap_reading": communication.overlap_reading(summary),
        "arrivals_reading": communication.arrivals_reading(summary),
        "bandwidth_reading": communication.bandwidth_reading(summary),
        "stragglers": evidence.stragglers_table(summary.stragglers, job.step_time_us) if summary.stragglers else ABSENT,
        "collectives": evidence.collectives_table(summary.collectives, len(job.steps))
        if summary.collectives
        else ABSENT,
        "cost_model": evidence.cost_table(summary.cost_model) if summary.cost_model else ABSENT,
        "tables": evidence.evidence_tables(summary),
        "memory_reading": memory.memory_reading(summary),
        "system_reading": system.system_reading(summary),
        "system_tables": system.system_tables(summary),
        **kernels.values(summary),
        **pipeline.values(summary),
        "gaps": gaps.gaps(summary),
        "failures": gaps.failures_table(job.failures),
        "definitions": DEFINITIONS,
        # A browser reads no infinity and no NaN.
        "packed_data": _packed(json.dumps(data, allow_nan=False, separators=(",", ":")).encode("ascii")),
        "data": data,
    }


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("perfscope.reports", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Last line of defence: a value that no formatter saw shows as absent, never as "None".
        finalize=lambda value: ABSENT if value is None else value,
    )
    environment.filters["bound"] = _bound
    environment.filters["at_joints"] = _at_joints
    return environment


def _bound(text: str) -> str:
    """``text`` with its numbers bound to their units, so that no line ends between them."""
    return _NUMBER_AND_UNIT.sub("\\1\u00a0\\2", text)


def _at_joints(name: str) -> list[str]:
    """A dotted name in the parts between which a line may end: after dots and underscores."""
    return re.split(r"(?<=[._])(?=.)", name[:400])


@cache
def _asset(name: str) -> str:
    """A file of ``assets``, as it goes into the page."""
    return (resources.files("perfscope.reports") / "assets" / name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    """The script that the plotly package brings, packed: from the cache, because packing takes longer than the rest of
    the page. The package itself is not imported: it is slow to.
    """
    package = importlib.util.find_spec("plotly")
    if package is None or not package.submodule_search_locations:
        raise PerfscopeError("the plotly package draws the report's charts and is not installed: pip install plotly")
    script = Path(package.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    cached = Cache.from_environment()
    content = cached.content(script) if cached is not None else None
    if cached is None or content is None:
        return _packed(script.read_bytes())
    name = f"{content.key}.gz.b64"
    packed = cached.load(name, lambda path: path.read_text(encoding="ascii"))
    if packed is None:
        packed = made = _packed(script.read_bytes())
        cached.save(name, lambda path: path.write_text(made, encoding="ascii"))
    return packed


def _packed(content: bytes) -> str:
    """Gzip in base64, the same for the same content: ``unpack.js`` reads it."""
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode("ascii")


def _policy(scripts: tuple[str, ...], *sources: str) -> str:
    """The content security policy: these scripts, inline styles (plotly sets them), pictures made here; no network.

    ``sources`` are allowed besides for scripts.
    """
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join((*(f"'sha256-{digest}'" for digest in hashes), *sources))
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
