"""The pictures of a comparison as plain geometry, in percent of their width: drawn without scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from perfscope.comparison import Difference, MetricChange, RowChange, RunRow
from perfscope.reports.difference_words import LABELS, improved, metric_value, relative, row_name, signed, verdict_word
from perfscope.reports.format import duration, known

VISIBLE: Final = 0.002
"""Parts of a step below this share are left out of the pictures: nobody could see them."""

_TILES: Final = {
    "step_time": "step_time",
    "samples_per_second": "throughput",
    "mfu": "mfu",
    "exposed_communication": "exposed_comm",
    "dataloader": "data_loading",
    "memory_peak": "memory_peak",
}
"""Metric of the first screen -> key of its definition."""

DOTS: Final = 400
"""Steps of one run that are drawn; of more, an even choice."""


@dataclass(frozen=True)
class Segment:
    """A part of a bar."""

    name: str
    """Row of the account; also the class of its colour."""
    left: float
    width: float
    text: str


@dataclass(frozen=True)
class RunBar:
    """One run's step: its parts, as long as they take."""

    label: str
    value: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class DeltaBar:
    """One row's change, to the left where time was saved; the whisker is its confidence interval."""

    name: str
    label: str
    value: str
    before: str
    after: str
    left: float
    width: float
    whisker_left: float | None
    whisker_width: float | None
    real: str
    """``yes``, ``no`` or ``unknown``."""
    verdict: str
    faster: bool


@dataclass(frozen=True)
class Deltas:
    """The changes that add up to the step's."""

    bars: tuple[DeltaBar, ...]
    zero: float
    total: DeltaBar
    hidden: str
    """What the rows too small to show add up to; empty where there are none."""


@dataclass(frozen=True)
class Dots:
    """One run's steps on a common axis."""

    label: str
    places: tuple[float, ...]
    mean: float
    text: str


def run_bars(runs: Sequence[RunRow]) -> tuple[RunBar, ...]:
    """Every run's step in its parts, all on one scale."""
    longest = max((run.step_time_us for run in runs), default=0.0)
    bars = []
    for run in runs:
        place, segments = 0.0, []
        for name, us in run.rows_us.items():
            if us > 0 and us >= VISIBLE * longest:
                segments.append(
                    Segment(name, 100 * place / longest, 100 * us / longest, f"{row_name(name)}: {duration(us)}")
                )
                place += us
        bars.append(RunBar(run.label, duration(run.step_time_us), tuple(segments)))
    return tuple(bars)


def deltas(difference: Difference) -> Deltas | None:
    """The rows' changes; None where a recording has no account."""
    rows, step = difference.rows, difference.step
    if not rows:
        return None
    shown = [row for row in rows if row.real or abs(row.delta_us) >= VISIBLE * step.before_us]
    rest = sum(row.delta_us for row in rows if row not in shown)
    whole = RowChange(
        name="step",
        before_us=step.before_us,
        after_us=step.after_us,
        delta_us=step.delta_us,
        low_us=step.low_us,
        high_us=step.high_us,
        real=None if step.verdict == "unknown" else step.verdict != "same",
    )
    reach = 1.25 * max(abs(row.delta_us) for row in (*shown, whole)) or 1.0
    points = [0.0, *(row.delta_us for row in (*shown, whole))]
    points += [_clipped(end, reach) for row in (*shown, whole) for end in (row.low_us, row.high_us) if end is not None]
    low, high = min(points), max(points)
    span = (high - low) or 1.0

    def place(us: float) -> float:
        return 100 * (us - low) / span

    return Deltas(
        bars=tuple(_delta_bar(row, row_name(row.name), place, reach) for row in shown),
        zero=place(0.0),
        total=_delta_bar(whole, "Step time", place, reach),
        hidden=signed(rest) if len(shown) < len(rows) and abs(rest) >= 0.05 else "",
    )


def dots(runs: Sequence[RunRow]) -> tuple[tuple[Dots, ...], str, str] | None:
    """Every step of every run on one axis, with the axis' ends in words; None where no run has single steps."""
    times = [time for run in runs for time in run.step_time_us_per_step]
    if not times or max(times) == min(times):
        return None
    low, high = min(times), max(times)
    margin = 0.03 * (high - low)
    low, span = low - margin, high - low + 2 * margin
    found = []
    for run in runs:
        values = run.step_time_us_per_step
        if values:
            stride = -(-len(values) // DOTS)
            places = tuple(round(100 * (time - low) / span, 2) for time in values[::stride])
            text = f"{len(values)} steps, {duration(min(values))} to {duration(max(values))}"
            found.append(Dots(run.label, places, round(100 * (fmean(values) - low) / span, 2), text))
    return tuple(found), duration(max(low, 0.0)), duration(low + span)


@dataclass(frozen=True)
class Tile:
    """One number of the first screen, before and after."""

    label: str
    definition: str
    """Key of the glossary; empty where it has no entry."""
    before: str
    after: str
    change: str
    good: str
    """``yes``, ``no`` or empty where neither."""


def tiles(difference: Difference) -> list[Tile]:
    """The metrics of the first screen that either run has."""
    by_name = {change.name: change for change in difference.metrics}
    return [_tile(by_name[name], definition) for name, definition in _TILES.items() if name in by_name]


def _tile(change: MetricChange, definition: str) -> Tile:
    better = improved(change)
    is_noise = change.real is not True and change.delta is not None
    moved = relative(change.before, change.after)
    if change.unit == "share" and known(change.delta):
        moved = f"{'−' if change.delta < 0 else '+'}{abs(change.delta) * 100:.1f} points"
    return Tile(
        label=LABELS[change.name],
        definition=definition,
        before=metric_value(change.before, change.unit),
        after=metric_value(change.after, change.unit),
        change=verdict_word(change.real) if is_noise else moved,
        good="" if is_noise or better is None else "yes" if better else "no",
    )


def _delta_bar(row: RowChange, label: str, place: Callable[[float], float], reach: float) -> DeltaBar:
    start, end = sorted((place(0.0), place(row.delta_us)))
    whisker = None
    if row.low_us is not None and row.high_us is not None:
        whisker = place(_clipped(row.low_us, reach)), place(_clipped(row.high_us, reach))
    return DeltaBar(
        name=row.name,
        label=label,
        value=signed(row.delta_us),
        before=duration(row.before_us),
        after=duration(row.after_us),
        left=start,
        width=end - start,
        whisker_left=whisker[0] if whisker else None,
        whisker_width=whisker[1] - whisker[0] if whisker else None,
        real="unknown" if row.real is None else "yes" if row.real else "no",
        verdict=verdict_word(row.real),
        faster=row.delta_us < 0,
    )


def _clipped(us: float, reach: float) -> float:
    return min(max(us, -reach), reach)
