"""What the charts of steps show, in words; other modules of the page describe the charts of their own section."""

from __future__ import annotations

import math
from statistics import median

from perfscope.frozen import dataclass
from perfscope.reports.figures.run import curve_name, step_numbers
from perfscope.reports.figures.step import path_by_rank, shown_strips
from perfscope.reports.page.timeline import shown_step
from perfscope.results.attribution import named, who
from perfscope.results.categories import BY_ID
from perfscope.results.findings import Prediction
from perfscope.results.rows import StepTimeline
from perfscope.results.summary import Summary
from perfscope.results.tables import CurvePoint, CurveRow
from perfscope.text import duration, percent, plural, rank_list, significant


def strips_reading(summary: Summary) -> str:
    """What the chart of one step shows."""
    strips = shown_strips(summary)
    if not strips:
        return ""
    recorded = len({strip.rank for strip in summary.step_timeline})
    reading = shown_step(summary, strips[0].step)
    everyone = max(recorded, len(summary.job.ranks))
    if everyone > len(strips):
        reading += f"; {len(strips)} of {everyone:,} ranks are shown, stragglers and an even selection"
    waits = {strip.rank: _time_in(strip, "exposed_comm_wait") for strip in strips}
    most, least = max(waits, key=waits.__getitem__), min(waits, key=waits.__getitem__)
    span = max(strip.start_us[-1] + strip.duration_us[-1] for strip in strips)
    if len(strips) > 1 and waits[most] >= 0.02 * span:
        reading += f". Rank {most} waits longest ({duration(waits[most])})"
        stragglers = named(summary.stragglers)
        # A straggler of other steps may itself wait in this one.
        if stragglers and not any(most in row.members for row in stragglers):
            reading += f": the others wait for {' and '.join(map(who, stragglers))}"
        else:
            reading += f", rank {least} least ({duration(waits[least])})"
    elif len(strips) > 1:
        reading += ". No rank waits for another more than 2% of the step"
    return reading + "."


def steps_reading(summary: Summary) -> str:
    """What the chart of step times shows."""
    times = summary.job.step_time_us_per_step
    if len(times) < 2:
        return ""
    middle, slowest = median(times), max(times)
    reading = f"The median is {duration(middle)}; the slowest is step {step_numbers(summary.job)[times.index(slowest)]}"
    reading += f" with {duration(slowest)} ({percent(slowest / middle - 1)} above the median)."
    outliers = [number for number, time in zip(step_numbers(summary.job), times, strict=True) if time > 1.5 * middle]
    if outliers:
        reading += f" {plural(len(outliers), 'step')} took more than 1.5x the median: {rank_list(outliers)}."
    return reading


def _time_in(strip: StepTimeline, name: str) -> float:
    return math.fsum(us for category, us in zip(strip.categories, strip.duration_us, strict=True) if category == name)


def path_reading(summary: Summary) -> str:
    """What the chart of the critical path shows."""
    total = path_by_rank(summary)
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


@dataclass(frozen=True)
class Curve:
    """One curve in words."""

    figure: str
    """Name of its figure."""
    setting: str
    reading: str


def curves(summary: Summary) -> tuple[Curve, ...]:
    """What each curve shows."""
    return tuple(Curve(curve_name(curve), curve.setting, _reading(curve)) for curve in summary.curves)


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
        predicted = Prediction(low=best.low_us, mid=best.mid_us, high=best.high_us)
        text += f" with {duration(now.mid_us)}. Predicted speedup: {predicted.speedup_of(now.mid_us)}"
    return f"{text}."


def _at(curve: CurveRow, value: float) -> CurvePoint | None:
    return next((point for point in curve.points if point.value == value), None)


def _value(curve: CurveRow, value: float) -> str:
    unit = curve.unit.removesuffix("s") if value == 1 and curve.unit.endswith("s") else curve.unit
    return f"{significant(value) if value != int(value) else f'{int(value):,}'} {unit}"
