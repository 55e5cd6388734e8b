"""Step times: of the recorded steps, of the whole run, and as predicted over the values of a setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from perfscope.reports.figures.colours import LIGHT, SERIES
from perfscope.reports.figures.layout import LEGEND_ABOVE, Drawn, figure, plain, shade, trace
from perfscope.reports.figures.numbers import rounded, scaled
from perfscope.results.history import History
from perfscope.results.rows import JobInfo
from perfscope.results.summary import Summary
from perfscope.results.tables import CurveRow
from perfscope.text import ScaledUnit, unit_for

_TYPICAL, _LONGEST, _MARKED = SERIES[0], SERIES[1], SERIES[2]

_WIDE: Final = 20
"""Values that span more than this factor want a scale on which doublings are evenly spread."""


def step_numbers(job: JobInfo) -> list[int]:
    """Step numbers, or the order of the steps where the numbers are not all known."""
    times = job.step_time_us_per_step
    return list(job.steps) if len(job.steps) == len(times) else list(range(len(times)))


def steps_figure(summary: Summary) -> Drawn | None:
    """The time of each recorded step; None below two."""
    times = summary.job.step_time_us_per_step
    if len(times) < 2:
        return None
    unit = unit_for(max(times))
    numbers = step_numbers(summary.job)
    middle = rounded(median(times) / unit.size)
    line = trace(
        "scatter",
        mode="lines" if len(times) > 200 else "lines+markers",
        x=numbers,
        y=scaled(times, unit),
        line={"color": _TYPICAL, "width": 2},
        marker={"size": 6},
        hovertemplate=f"step %{{x}}<br>%{{y:.4~g}} {unit.name}<extra></extra>",
    )
    dashes = {"dash": "dash", "width": 1, "color": LIGHT["muted"]}
    few = {"dtick": max(1, round((numbers[-1] - numbers[0]) / (len(numbers) - 1)))} if len(numbers) <= 12 else {}
    return figure(
        "Time of each recorded step",
        [line],
        height=230,
        shapes=[{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": middle, "y1": middle, "line": dashes}],
        xaxis={"title": {"text": "step"}, "tickformat": "d", "showgrid": False, "nticks": 12, **few},
        yaxis={"title": {"text": unit.name}, "rangemode": "tozero"},
    )


def history_figure(summary: Summary) -> Drawn | None:
    """Median and longest step of each part of the run, and the outliers; None below two parts."""
    history = summary.history
    if history is None or len(history.bins) < 2:
        return None
    unit = unit_for(max(part.max_us for part in history.bins))
    middle = [(part.first_step + part.last_step) / 2 for part in history.bins]
    spans = [
        f"step {part.first_step}"
        if part.first_step == part.last_step
        else f"steps {part.first_step} to {part.last_step}"
        for part in history.bins
    ]

    def line(name: str, values: Sequence[float], colour: str, width: int) -> Drawn:
        return trace(
            "scatter",
            mode="lines" if len(middle) > 60 else "lines+markers",
            name=name,
            x=middle,
            y=scaled(values, unit),
            customdata=spans,
            line={"color": colour, "width": width},
            marker={"size": 4},
            hovertemplate=f"<b>{name}</b><br>%{{customdata}}: %{{y:.4~g}} {unit.name}<extra></extra>",
        )

    recorded = summary.job.steps
    longest, middles = ([getattr(part, name) for part in history.bins] for name in ("max_us", "median_us"))
    lines = [line("longest step", longest, _LONGEST, 1)] if longest != middles else []
    return figure(
        "Step times of the whole run",
        [*lines, line("median step", middles, _TYPICAL, 2), _outliers(history, unit)],
        height=270,
        showlegend=True,
        legend=LEGEND_ABOVE,
        shapes=[shade(min(recorded) - 0.5, max(recorded) + 0.5)] if recorded else [],
        xaxis={"title": {"text": "step"}, "tickformat": "d", "showgrid": False},
        yaxis={"title": {"text": unit.name}, "rangemode": "tozero"},
    )


def _outliers(history: History, unit: ScaledUnit) -> Drawn:
    return trace(
        "scatter",
        mode="markers",
        name="outlier",
        x=[row.step for row in history.outliers],
        y=scaled((row.us for row in history.outliers), unit),
        customdata=[
            plain(row.stage) + (f", rank {row.rank}" if row.rank is not None else "") for row in history.outliers
        ],
        marker={"color": _MARKED, "symbol": "x", "size": 8},
        hovertemplate=f"<b>outlier</b><br>step %{{x}}: %{{y:.4~g}} {unit.name}<br>%{{customdata}}<extra></extra>",
    )


def curve_name(curve: CurveRow) -> str:
    """The name of a what-if curve's figure: ``whatif_dataloader_num_workers``."""
    return f"whatif_{''.join(letter if letter.isalnum() else '_' for letter in curve.setting)}"


def curve_figure(curve: CurveRow) -> Drawn:
    """Predicted step time over the values of one setting, with the range of the prediction."""
    unit = unit_for(max(point.high_us for point in curve.points))
    values = [point.value for point in curve.points]
    low, mid, high = (
        scaled((getattr(point, end) for point in curve.points), unit, 5) for end in ("low_us", "mid_us", "high_us")
    )

    def edge(y: Sequence[float | None], fill: str) -> Drawn:
        return trace("scatter",
            mode="lines", x=values, y=y, line={"width": 0}, fill=fill, fillcolor=LIGHT["line"], hoverinfo="skip",
            showlegend=False,
        )  # fmt: skip

    traces = [
        edge(low, "none"),
        edge(high, "tonexty"),
        trace(
            "scatter",
            mode="lines+markers",
            name="predicted step",
            x=values,
            y=mid,
            customdata=list(zip(low, high, strict=True)),
            line={"color": _TYPICAL, "width": 2},
            marker={"size": 6},
            hovertemplate=f"%{{x}} {plain(curve.unit)}<br><b>%{{y:.4~g}} {unit.name}</b> "
            "(%{customdata[0]:.4~g} to %{customdata[1]:.4~g})<extra></extra>",
        ),
    ]
    if curve.current in values:
        marker = {"size": 15, "symbol": "circle-open", "color": _MARKED, "line": {"width": 2.5}}
        now = trace("scatter",
            mode="markers", name="now", x=[curve.current], y=[mid[values.index(curve.current)]], marker=marker,
            hoverinfo="skip",
        )  # fmt: skip
        traces.append(now)
    return figure(
        f"What if {plain(curve.setting)}",
        traces,
        height=260,
        xaxis={"title": {"text": plain(curve.unit)}, "showgrid": False, **_ticks(values)},
        yaxis={"title": {"text": f"{unit.name} per step"}, "range": _range(curve, unit)},
    )


def _ticks(values: Sequence[float]) -> dict[str, Any]:
    is_wide = values[0] > 0 and values[-1] / values[0] > _WIDE
    return {"type": "log" if is_wide else "linear", "tickvals": list(values), "ticktext": [f"{v:g}" for v in values]}


def _range(curve: CurveRow, unit: ScaledUnit) -> list[float]:
    """From zero a curve that matters may look flat; but what differs by a hair must not look like a cliff either."""
    least, most = (
        pick(getattr(point, end) / unit.size for point in curve.points if math.isfinite(getattr(point, end)))
        for pick, end in ((min, "low_us"), (max, "high_us"))
    )
    room = max(0.1 * (most - least), 0.1 * most)
    return [max(0.0, least - room), most + room]
