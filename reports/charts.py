"""What the charts draw, as plain values for the page's scripts, and what each one shows in words.

Times are converted here to one unit a chart; the scripts add colours and sizes only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from perfscope.reports.account import HEATMAP_ABOVE
from perfscope.reports.categories import BY_NAME, CATEGORIES
from perfscope.reports.communication import arrivals_chart, overlap_chart
from perfscope.reports.curves import curves_chart
from perfscope.reports.format import duration, known, plural, rank_list, ranks_named, share, unit_for
from perfscope.reports.memory import memory_chart
from perfscope.reports.path import path_chart
from perfscope.reports.run_history import history_chart
from perfscope.reports.system import system_chart
from perfscope.reports.timeline import timeline_chart
from perfscope.summary import ROWS, AccountRow, CollectiveRow, CostRow, Strip, Summary

STRIPS_SHOWN: Final = 32
"""More ranks than this do not fit a picture of one step; those blamed and an even choice of the others are shown."""

STRETCHES_SHOWN: Final = 6000
"""Stretches in one picture that a browser still draws at once."""

_DIGITS: Final = 4
"""Significant digits of a number in a chart: a screen shows no more."""


def chart_data(summary: Summary) -> dict[str, Any]:
    """All charts' values; a chart with nothing to show is None."""
    return {
        "categories": [{"name": category.name, "label": category.label} for category in CATEGORIES],
        "account": _account(summary.accounting),
        "strips": _strips(shown_strips(summary)),
        "steps": _steps(summary),
        "bandwidth": _bandwidth(summary.collectives, summary.cost_model),
        "timeline": timeline_chart(summary),
        "path": path_chart(summary),
        "history": history_chart(summary),
        "curves": curves_chart(summary),
        "overlap": overlap_chart(summary),
        "arrivals": arrivals_chart(summary),
        "memory": memory_chart(summary),
        "system": system_chart(summary),
    }


def shown_strips(summary: Summary) -> tuple[Strip, ...]:
    """The strips of one step that the picture shows, by rank: all, or those blamed and an even choice of the others."""
    if not summary.strips:
        return ()
    step = summary.strips[0].step
    strips = sorted(
        (strip for strip in summary.strips if strip.step == step and strip.start_us), key=lambda strip: strip.rank
    )
    if len(strips) <= STRIPS_SHOWN:
        return tuple(strips)
    blamed = {row.rank for row in summary.stragglers[: STRIPS_SHOWN // 4]}
    even = {
        strips[index * (len(strips) - 1) // (STRIPS_SHOWN - len(blamed) - 1)].rank
        for index in range(STRIPS_SHOWN - len(blamed))
    }
    return tuple(strip for strip in strips if strip.rank in blamed | even)


def blamed_ranks(summary: Summary) -> tuple[int, ...]:
    """The ranks that cost at least half as much as the worst straggler, at most three: the rest is not worth naming."""
    rows = summary.stragglers
    return tuple(row.rank for row in rows[:3] if row.lost_us >= rows[0].lost_us / 2)


def strips_reading(summary: Summary) -> str:
    """What the picture of one step shows here."""
    strips = shown_strips(summary)
    if not strips:
        return ""
    recorded = len({strip.rank for strip in summary.strips})
    name = f"step {strips[0].step}" if strips[0].step is not None else "the whole recording"
    reading = f"Here {name}"
    everyone = max(recorded, len(summary.job.ranks))
    if everyone > len(strips):
        reading += f", {len(strips)} of {everyone:,} ranks: those blamed and an even choice of the others"
    waits = {strip.rank: _time_in(strip, "exposed_comm_wait") for strip in strips}
    most, least = max(waits, key=waits.__getitem__), min(waits, key=waits.__getitem__)
    span = max(strip.start_us[-1] + strip.duration_us[-1] for strip in strips)
    if len(strips) > 1 and waits[most] >= 0.02 * span:
        reading += f". Rank {most} waits longest for others ({duration(waits[most])})"
        reading += f", rank {least} least ({duration(waits[least])})"
        blamed = blamed_ranks(summary)
        reading += f": the others wait for {ranks_named(blamed)}" if blamed else ""
    elif len(strips) > 1:
        reading += ". No rank waits for another by more than 2% of the step"
    return reading + "."


def steps_reading(summary: Summary) -> str:
    """What the picture of step times shows here."""
    times = summary.job.step_time_us_per_step
    if len(times) < 2:
        return ""
    middle, slowest = median(times), max(times)
    reading = f"Here the median is {duration(middle)}; the slowest is step {_numbers(summary)[times.index(slowest)]}"
    reading += f" with {duration(slowest)} ({share(slowest / middle - 1)} above the median)."
    outliers = [number for number, time in zip(_numbers(summary), times, strict=True) if time > 1.5 * middle]
    if outliers:
        reading += f" {plural(len(outliers), 'step')} took more than 1.5× the median: {rank_list(outliers)}."
    return reading


def bandwidth_reading(summary: Summary) -> str:
    """What the picture of bandwidth against size shows here."""
    rated = [row for row in summary.collectives if known(row.busbw_gbps) and row.bytes]
    if not rated:
        return ""
    best = max(rated, key=lambda row: row.busbw_gbps or 0.0)
    return f"Here {best.kind.replace('_', '-')} reaches {best.busbw_gbps:.3g} GB/s at best."


def _account(rows: Sequence[AccountRow]) -> dict[str, Any] | None:
    if not rows:
        return None
    unit = unit_for(max(row.step_time_us for row in rows))
    named = {name: [row.rows()[name] for row in rows] for name in ROWS}
    return {
        "kind": "heatmap" if len(rows) > HEATMAP_ABOVE else "bars",
        "unit": unit.name,
        "ranks": [row.rank for row in rows],
        "hosts": [row.host for row in rows],
        "steps": [_round(row.step_time_us / unit.size) for row in rows],
        "values": {name: [_round(us / unit.size) for us in values] for name, values in named.items() if any(values)},
    }


def _strips(strips: Sequence[Strip]) -> dict[str, Any] | None:
    if not strips:
        return None
    span = max(strip.start_us[-1] + strip.duration_us[-1] for strip in strips)
    unit = unit_for(span)
    crowded = sum(len(strip.start_us) for strip in strips) > STRETCHES_SHOWN
    rows = []
    for strip in strips:
        stretches = _coarse(strip, span * len(strips) / STRETCHES_SHOWN) if crowded else _stretches(strip)
        rows.append(
            {
                "rank": strip.rank,
                "category": [ROWS.index(name) for name, _, _ in stretches],
                "start": [_round(start / unit.size, 6) for _, start, _ in stretches],
                "duration": [_round(length / unit.size, 6) for _, _, length in stretches],
            }
        )
    return {"unit": unit.name, "rows": rows}


def _stretches(strip: Strip) -> list[tuple[str, float, float]]:
    """(category, start, duration) of a strip, those of a category this page does not know left out."""
    pieces = zip(strip.categories, strip.start_us, strip.duration_us, strict=True)
    return [(name, start, length) for name, start, length in pieces if name in BY_NAME]


def _coarse(strip: Strip, bin_us: float) -> list[tuple[str, float, float]]:
    """A strip in bins of ``bin_us``, each shown as the category that takes most of it; equal neighbours are joined."""
    bins: dict[int, dict[str, float]] = {}
    for name, start, length in _stretches(strip):
        first, last = int(start // bin_us), int((start + length) // bin_us)
        for number in range(first, last + 1):
            covered = min(start + length, (number + 1) * bin_us) - max(start, number * bin_us)
            if covered > 0:
                taken = bins.setdefault(number, {})
                taken[name] = taken.get(name, 0.0) + covered
    joined: list[tuple[str, float, float]] = []
    for number in sorted(bins):
        name = max(bins[number], key=bins[number].__getitem__)
        if joined and joined[-1][0] == name and math.isclose(joined[-1][1] + joined[-1][2], number * bin_us):
            joined[-1] = (name, joined[-1][1], (number + 1) * bin_us - joined[-1][1])
        else:
            joined.append((name, number * bin_us, bin_us))
    return joined


def _steps(summary: Summary) -> dict[str, Any] | None:
    times = summary.job.step_time_us_per_step
    if len(times) < 2:
        return None
    unit = unit_for(max(times))
    return {
        "unit": unit.name,
        "numbers": _numbers(summary),
        "times": [_round(time / unit.size) for time in times],
        "median": _round(median(times) / unit.size),
    }


def _bandwidth(collectives: Sequence[CollectiveRow], models: Sequence[CostRow]) -> dict[str, Any] | None:
    """Bus bandwidth against size by group and kind, with the fitted curve; None below two sizes: no curve to see."""
    rated = [
        row for row in collectives if known(row.busbw_gbps) and known(row.algbw_gbps) and row.algbw_gbps and row.bytes
    ]
    if len({row.bytes for row in rated}) < 2:
        return None
    fits = {(model.group, model.kind): model for model in models}
    series = []
    for key in sorted({(row.group, row.kind) for row in rated}):
        mine = sorted((row for row in rated if (row.group, row.kind) == key), key=lambda row: row.bytes or 0)
        curve = _curve(fits[key], mine) if key in fits and len({row.bytes for row in mine}) > 1 else None
        series.append(
            {
                "name": f"{key[1].replace('_', '-')}, group {key[0]}" if key[0] else key[1].replace("_", "-"),
                "bytes": [row.bytes for row in mine],
                "busbw": [_round(row.busbw_gbps) for row in mine],
                "curve": curve,
                "limit": _round(fits[key].busbw_gbps) if curve else None,
            }
        )
    return {"series": series}


def _curve(model: CostRow, rows: Sequence[CollectiveRow]) -> dict[str, list[float | None]] | None:
    """The bus bandwidth that the cost model gives between the smallest and the largest size."""
    factor = (rows[0].busbw_gbps or 0.0) / (rows[0].algbw_gbps or 1.0)
    low, high = rows[0].bytes or 1, rows[-1].bytes or 1
    if not known(model.busbw_gbps) or not model.busbw_gbps or not factor:
        return None
    sizes = [low * (high / low) ** (index / 40) for index in range(41)]
    # 1 GB/s moves 1000 bytes a µs.
    times = [model.alpha_us + size * factor / (model.busbw_gbps * 1e3) for size in sizes]
    rates = [_round(size * factor / time / 1e3) if time > 0 else None for size, time in zip(sizes, times, strict=True)]
    return {"bytes": [_round(size) for size in sizes], "busbw": rates}


def _numbers(summary: Summary) -> list[int]:
    """Step numbers, or the order of the steps where the numbers are not all known."""
    job = summary.job
    times = job.step_time_us_per_step
    return list(job.steps) if len(job.steps) == len(times) else list(range(len(times)))


def _time_in(strip: Strip, name: str) -> float:
    return math.fsum(us for category, us in zip(strip.categories, strip.duration_us, strict=True) if category == name)


def _round(value: float | None, digits: int = _DIGITS) -> float | None:
    """Rounded to significant digits, so that the page carries no more than it shows; None where not a number."""
    return float(f"{value:.{digits}g}") if known(value) else None
