"""Hosts and devices over time: a row of the chart for each quantity."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, Final

from perfscope.reports.figures.colours import LIGHT, SERIES
from perfscope.reports.figures.layout import LEGEND_ABOVE, Drawn, figure, shade, shortened, trace
from perfscope.reports.figures.numbers import rounded, scaled
from perfscope.results.summary import Summary
from perfscope.results.system import Series, System
from perfscope.text import ScaledUnit, unit_for

SERIES_SHOWN: Final = 8
"""In one row of the chart; more cannot be told apart."""

_ROWS: Final = (
    ("utilisation", "GPU busy, %", 100.0, False),
    ("clock", "clock, % of maximum", 100.0, False),
    ("power", "power, % of limit", 100.0, False),
    ("cpu", "CPU busy, %", 100.0, True),
    ("runnable", "runnable threads per core", 1.0, True),
)
"""Of the chart: series, axis, factor, and whether the highest or the lowest of many series are drawn."""

_GAP: Final = 0.08
"""Between two rows, as a share of the chart's height."""


def system_figure(summary: Summary) -> Drawn | None:
    """A line for each device or host, in a row for each quantity; None where nothing was sampled."""
    system = summary.system
    if system is None or not system.series:
        return None
    unit = unit_for(max(abs(time) for series in system.series for time in (series.time_us[0], series.time_us[-1])))
    rows = []
    for what, axis, factor, highest in _ROWS:
        series = _extreme([each for each in system.series if each.what == what], highest=highest)
        if series:
            rows.append((axis, factor, series))
    names = dict.fromkeys(_name(each, system) for _, _, series in rows for each in series)
    colours = {name: SERIES[at % len(SERIES)] for at, name in enumerate(names)}
    traces: list[Drawn] = []
    axes = {}
    unnamed = set(names)
    for number, (axis, factor, series) in enumerate(rows, start=1):
        suffix = str(number) if number > 1 else ""
        axes[f"yaxis{suffix}"] = _axis(axis, number, len(rows))
        for each in series:
            name = _name(each, system)
            line = _line(each, name, axis, factor, unit)
            line.update(yaxis=f"y{suffix}", line={"color": colours[name], "width": 1.5}, showlegend=name in unnamed)
            unnamed.discard(name)
            traces.append(line)
    anchor = f"y{len(rows)}" if len(rows) > 1 else "y"
    start, end = (edge / unit.size for edge in system.window_us)
    return figure(
        "Hosts and devices over time",
        traces,
        height=80 + 130 * len(rows),
        showlegend=len(names) > 1,
        legend=LEGEND_ABOVE,
        shapes=[shade(start, end)],
        xaxis={"title": {"text": f"{unit.name} from the first recorded step"}, "showgrid": False, "anchor": anchor},
        **axes,
    )


def _axis(title: str, number: int, rows: int) -> dict[str, Any]:
    """The vertical axis of a row, counted from 1."""
    tall = (1 - _GAP * (rows - 1)) / rows
    top = 1 - (number - 1) * (tall + _GAP)
    return {
        "domain": [max(top - tall, 0.0), min(top, 1.0)], "title": {"text": title, "font": {"size": 11}}, "nticks": 4,
        "rangemode": "tozero", "gridcolor": LIGHT["line"], "zerolinecolor": LIGHT["line"], "automargin": True,
    }  # fmt: skip


def _line(series: Series, name: str, axis: str, factor: float, unit: ScaledUnit) -> Drawn:
    return trace(
        "scatter",
        mode="lines" if len(series.time_us) > 60 else "lines+markers",
        name=shortened(name),
        legendgroup=shortened(name),
        x=scaled(series.time_us, unit),
        y=[rounded(value * factor) for value in series.values],
        marker={"size": 4},
        hovertemplate=f"<b>{shortened(name)}</b><br>%{{y:.4~g}} at %{{x:.4~g}} {unit.name}<extra>{axis}</extra>",
    )


def _extreme(series: Sequence[Series], *, highest: bool) -> list[Series]:
    """The series in a row of the chart: the highest or lowest, in the order of their names."""
    chosen = sorted(series, key=lambda each: fmean(each.values), reverse=highest)[:SERIES_SHOWN]
    return sorted(chosen, key=lambda each: (each.host, -1 if each.device is None else each.device))


def _name(series: Series, system: System) -> str:
    """The name of a series: with the host only where there are several."""
    if series.device is None:
        return series.host
    return f"GPU {series.device}" if len(system.hosts) == 1 else f"{series.host} GPU {series.device}"
