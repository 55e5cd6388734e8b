"""What the charts draw, as plain values for the page's scripts, and what each one shows in words.

Times are converted here to one unit per chart; the scripts add colors and sizes only. Other
modules of the page make the charts of their own section.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from perfscope.reports.page.breakdown import breakdown_chart
from perfscope.reports.page.communication import arrivals_chart, bandwidth_chart, overlap_chart
from perfscope.reports.page.memory import memory_chart
from perfscope.reports.page.numbers import rounded, scaled
from perfscope.reports.page.run_history import history_chart
from perfscope.reports.page.system import system_chart
from perfscope.reports.page.timeline import timeline_chart
from perfscope.results.attribution import attributed_ranks, named, who
from perfscope.results.categories import BY_ID, CATEGORIES, TimeCategory
from perfscope.results.rows import StepTimeline
from perfscope.results.summary import Summary
from perfscope.results.tables import CurvePoint, CurveRow
from perfscope.text import duration, factor, percent, plural, rank_list, significant, unit_for

STRIPS_SHOWN: Final = 32
"""More ranks do not fit the chart of one step: the stragglers and an even selection of the others are shown."""

STRETCHES_SHOWN: Final = 6000
"""Stretches in one chart that a browser still draws at once."""

PATH_RANKS_SHOWN: Final = 8
"""Ranks in the chart of the critical path, those with most of it; the others are one row."""


def chart_data(summary: Summary) -> dict[str, Any]:
    """All charts' values; a chart with nothing to show is None."""
    return {
        "categories": [{"name": category.id, "label": category.label} for category in TimeCategory],
        "breakdown": breakdown_chart(summary.time_breakdown),
        "strips": _strips(shown_strips(summary)),
        "steps": _steps(summary),
        "bandwidth": bandwidth_chart(summary.collectives, summary.cost_model),
        "timeline": timeline_chart(summary),
        "path": path_chart(summary),
        "history": history_chart(summary),
        "curves": curves_chart(summary),
        "overlap": overlap_chart(summary),
        "arrivals": arrivals_chart(summary),
        "memory": memory_chart(summary),
        "system": system_chart(summary),
    }


def shown_strips(summary: Summary) -> tuple[StepTimeline, ...]:
    """The strips of one step in the chart, by rank: all, or the stragglers and an even selection of the others."""
    if not summary.step_timeline:
        return ()
    step = summary.step_timeline[0].step
    strips = sorted(
        (strip for strip in summary.step_timeline if strip.step == step and strip.start_us),
        key=lambda strip: strip.rank,
    )
    if len(strips) <= STRIPS_SHOWN:
        return tuple(strips)
    shown = {strip.rank for strip in strips}
    first = [rank for rank in attributed_ranks(summary.stragglers) if rank in shown]
    stragglers = set(first[: STRIPS_SHOWN // 4])
    even = {
        strips[index * (len(strips) - 1) // (STRIPS_SHOWN - len(stragglers) - 1)].rank
        for index in range(STRIPS_SHOWN - len(stragglers))
    }
    return tuple(strip for strip in strips if strip.rank in stragglers | even)


def strips_reading(summary: Summary) -> str:
    """What the chart of one step shows."""
    strips = shown_strips(summary)
    if not strips:
        return ""
    recorded = len({strip.rank for strip in summary.step_timeline})
    name = f"step {strips[0].step}" if strips[0].step is not None else "the whole recording"
    reading = name.capitalize()
    everyone = max(recorded, len(summary.job.ranks))
    if everyone > len(strips):
        reading += f"; {len(strips)} of {everyone:,} ranks are shown, stragglers and an even selection"
    waits = {strip.rank: _time_in(strip, "exposed_comm_wait") for strip in strips}
    most, least = max(waits, key=waits.__getitem__), min(waits, key=waits.__getitem__)
    span = max(strip.start_us[-1] + strip.duration_us[-1] for strip in strips)
    if len(strips) > 1 and waits[most] >= 0.02 * span:
        reading += f". Rank {most} waits longest ({duration(waits[most])})"
        waited_for = " and ".join(who(row) for row in named(summary.stragglers))
        least_of_all = f", rank {least} least ({duration(waits[least])})"
        reading += f": the others wait for {waited_for}" if waited_for else least_of_all
    elif len(strips) > 1:
        reading += ". No rank waits for another more than 2% of the step"
    return reading + "."


def steps_reading(summary: Summary) -> str:
    """What the chart of step times shows."""
    times = summary.job.step_time_us_per_step
    if len(times) < 2:
        return ""
    middle, slowest = median(times), max(times)
    reading = f"The median is {duration(middle)}; the slowest is step {_numbers(summary)[times.index(slowest)]}"
    reading += f" with {duration(slowest)} ({percent(slowest / middle - 1)} above the median)."
    outliers = [number for number, time in zip(_numbers(summary), times, strict=True) if time > 1.5 * middle]
    if outliers:
        reading += f" {plural(len(outliers), 'step')} took more than 1.5x the median: {rank_list(outliers)}."
    return reading


def _strips(strips: Sequence[StepTimeline]) -> dict[str, Any] | None:
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
                "category": [CATEGORIES.index(name) for name, _, _ in stretches],
                "start": scaled((start for _, start, _ in stretches), unit, 6),
                "duration": scaled((length for _, _, length in stretches), unit, 6),
            }
        )
    return {"unit": unit.name, "rows": rows}


def _stretches(strip: StepTimeline) -> list[tuple[str, float, float]]:
    """(category, start, duration) of a strip, those of a category this page does not know left out."""
    pieces = zip(strip.categories, strip.start_us, strip.duration_us, strict=True)
    return [(name, start, length) for name, start, length in pieces if name in BY_ID]


def _coarse(strip: StepTimeline, bin_us: float) -> list[tuple[str, float, float]]:
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
        "times": scaled(times, unit),
        "median": rounded(median(times) / unit.size),
    }


def _numbers(summary: Summary) -> list[int]:
    """Step numbers, or the order of the steps where the numbers are not all known."""
    job = summary.job
    times = job.step_time_us_per_step
    return list(job.steps) if len(job.steps) == len(times) else list(range(len(times)))


def _time_in(strip: StepTimeline, name: str) -> float:
    return math.fsum(us for category, us in zip(strip.categories, strip.duration_us, strict=True) if category == name)


def path_chart(summary: Summary) -> dict[str, Any] | None:
    """Time of each rank's parts on the path; None where the path is not known."""
    total = _by_rank(summary)
    if not total:
        return None
    length = math.fsum(us for parts in total.values() for us in parts.values())
    unit = unit_for(length)
    ordered = sorted(total, key=lambda rank: -math.fsum(total[rank].values()))
    rows = [(f"rank {rank}", total[rank]) for rank in ordered[:PATH_RANKS_SHOWN]]
    if ordered[PATH_RANKS_SHOWN:]:
        rest: dict[str, float] = {}
        for rank in ordered[PATH_RANKS_SHOWN:]:
            for name, us in total[rank].items():
                rest[name] = rest.get(name, 0.0) + us
        rows.append((f"{len(ordered) - PATH_RANKS_SHOWN:,} others", rest))
    names = [name for name in BY_ID if any(name in parts for _, parts in rows)]
    return {
        "unit": unit.name,
        "rows": [label for label, _ in rows],
        "values": {name: scaled((parts.get(name, 0.0) for _, parts in rows), unit) for name in names},
        "total": rounded(length / unit.size),
    }


def path_reading(summary: Summary) -> str:
    """What the chart of the critical path shows."""
    total = _by_rank(summary)
    length = math.fsum(us for parts in total.values() for us in parts.values())
    if length <= 0:
        return ""
    rank = max(total, key=lambda rank: math.fsum(total[rank].values()))
    share = math.fsum(total[rank].values()) / length
    name = max(total[rank], key=total[rank].__getitem__)
    label = BY_ID[name].phrase if name in BY_ID else name
    text = f"The critical path takes {duration(length)}"
    if len(summary.job.ranks) > 1:
        text += f", {percent(share)} of it on rank {rank}"
    return f"{text}; the largest part is {label} with {percent(total[rank][name] / length)}."


def _by_rank(summary: Summary) -> dict[int, dict[str, float]]:
    total: dict[int, dict[str, float]] = {}
    for row in summary.critical_path or ():
        parts = total.setdefault(row.rank, {})
        parts[row.category] = parts.get(row.category, 0.0) + row.us
    return total


@dataclass(frozen=True)
class Curve:
    """One curve in words."""

    setting: str
    reading: str


def curves_chart(summary: Summary) -> list[dict[str, Any]]:
    """The values of every curve, in one unit of time each."""
    return [_curve(curve) for curve in summary.curves]


def curves(summary: Summary) -> tuple[Curve, ...]:
    """What each curve shows, in the order of ``curves_chart``."""
    return tuple(Curve(curve.setting, _reading(curve)) for curve in summary.curves)


def _curve(curve: CurveRow) -> dict[str, Any]:
    unit = unit_for(max(point.high_us for point in curve.points))
    return {
        "setting": curve.setting,
        "of": curve.unit,
        "unit": unit.name,
        "values": [point.value for point in curve.points],
        "low": scaled((point.low_us for point in curve.points), unit, 5),
        "mid": scaled((point.mid_us for point in curve.points), unit, 5),
        "high": scaled((point.high_us for point in curve.points), unit, 5),
        "current": curve.current,
        "best": curve.best,
    }


def _reading(curve: CurveRow) -> str:
    best = _at(curve, curve.best)
    if curve.current is None and best is not None and best.mid_us > min(point.mid_us for point in curve.points):
        return (
            f"No value saves more than 2% over {_value(curve, curve.best)} ({duration(best.mid_us)} per step). The "
            "current value was not recorded."
        )
    text = f"Best: {_value(curve, curve.best)}"
    if best is not None:
        text += f" with {duration(best.mid_us)} per step"
    now = _at(curve, curve.current) if curve.current is not None else None
    if curve.current is None:
        return f"{text}. The current value was not recorded."
    if curve.current == curve.best:
        return f"The current value, {_value(curve, curve.best)}, is as good as any."
    text += f"; current: {_value(curve, curve.current)}"
    if now is not None and best is not None and best.mid_us > 0:
        text += f" with {duration(now.mid_us)}. Predicted speedup: {factor(now.mid_us / best.mid_us)}"
    return f"{text}."


def _at(curve: CurveRow, value: float) -> CurvePoint | None:
    return next((point for point in curve.points if point.value == value), None)


def _value(curve: CurveRow, value: float) -> str:
    unit = curve.unit.removesuffix("s") if value == 1 and curve.unit.endswith("s") else curve.unit
    return f"{significant(value) if value != int(value) else f'{int(value):,}'} {unit}"
