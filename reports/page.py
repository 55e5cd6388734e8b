"""The page: one self-contained HTML file, rendered from a ``Summary`` alone.

Nothing is loaded from anywhere: style, scripts, plotly and data are inside the file. Its content security policy allows
only the scripts whose hashes it names: even a name from a trace that slipped past the escaping could not run or fetch
anything.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

import jinja2
import plotly.offline

from perfscope.paths import partial
from perfscope.reports import account, advice, charts, evidence, gaps, kernels, memory, overview, pipeline, system
from perfscope.reports.categories import CATEGORIES, shares
from perfscope.reports.definitions import DEFINITIONS
from perfscope.reports.format import ABSENT, share
from perfscope.summary import Summary

_SCRIPTS: Final = ("tooltips.js", "tables.js", "copy.js", "figures.js", "charts.js")
"""In the order in which they run."""

_NUMBER_AND_UNIT: Final = re.compile(r"(\d) (%|[mµ]?s\b|[KMGT]?i?B\b|[MGT]B/s|TFLOP)")

TOP_FINDINGS: Final = 5
"""Findings listed under the verdict; the rest is further down."""


def render(summary: Summary) -> str:
    """The whole page as HTML."""
    scripts = (_plotly(), *(_asset(name) for name in _SCRIPTS))
    return (
        _environment()
        .get_template("page.html")
        .render(
            **_values(summary),
            style=_asset("page.css"),
            scripts=scripts,
            policy=_policy(scripts),
        )
    )


def write(summary: Summary, path: Path) -> None:
    """Write the page, whole or not at all. Raises OSError when the folder cannot be written."""
    temporary = partial(path)
    # A name from a trace may hold half a surrogate pair, which UTF-8 cannot write.
    temporary.write_text(render(summary), encoding="utf-8", errors="replace", newline="\n")
    temporary.replace(path)


def _values(summary: Summary) -> dict[str, Any]:
    """Everything the template shows, worked out; the template itself decides nothing but layout."""
    rows, job = summary.accounting, summary.job
    taken, data = shares(rows), charts.chart_data(summary)
    return {
        "summary": summary,
        "verdict": summary.verdict,
        "identity": overview.identity(summary),
        "command": overview.command(job),
        "facts": overview.facts(summary),
        "tiles": overview.tiles(summary),
        "certainty": overview.certainty(summary),
        "mean_step": [(c, taken[c.name], share(taken[c.name])) for c in CATEGORIES if taken[c.name] >= 0.0005],
        "cards": advice.cards(summary),
        "plan": advice.plan_sentence(summary),
        "top_findings": TOP_FINDINGS,
        "legend": account.legend(rows),
        "account_table": account.account_table(rows) if rows else ABSENT,
        "named_host": account.named_host_table(rows),
        "account_reading": account.account_reading(summary),
        "is_heatmap": len(rows) > account.HEATMAP_ABOVE,
        "strips": charts.shown_strips(summary),
        "strips_reading": charts.strips_reading(summary),
        "steps_reading": charts.steps_reading(summary),
        "has_curve": any(series["curve"] for series in (data["bandwidth"] or {"series": ()})["series"]),
        "bandwidth_reading": charts.bandwidth_reading(summary),
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
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _bound(text: str) -> str:
    """``text`` with its numbers bound to their units, so that no line ends between them."""
    return _NUMBER_AND_UNIT.sub("\\1\u00a0\\2", text)


@cache
def _asset(name: str) -> str:
    """A file of ``assets``, as it goes into the page."""
    return (resources.files("perfscope.reports") / "assets" / name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    """Plotly's script. Line ends as a browser reads them, or the hash in the policy would not match."""
    script: str = plotly.offline.get_plotlyjs()
    return script.replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script")


def _policy(scripts: tuple[str, ...]) -> str:
    """The content security policy: these scripts, inline styles (plotly sets them), pictures made here; no network."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
