"""The pictures of a comparison as plain geometry, in percent of their width, drawn without scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Final

from perfscope.frozen import dataclass
from perfscope.reports.compare import words
from perfscope.results.comparison import CategoryChange, Difference, MetricChange, RunRow
from perfscope.text import duration, known

VISIBLE: Final = 0.002
"""Smaller parts of a step are left out of the pictures, since nobody could see them."""

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
"""Steps of one run that are drawn; of more steps every n-th."""


@dataclass(frozen=True)
class Segment:
    """A part of a bar."""

    name: str
    """Id of the category; also the class of its colour."""
    left: float
    width: float
    text: str


@dataclass(frozen=True)
class RunBar:
    """The time breakdown of one run's step."""

    label: str
    value: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class DeltaBar:
    """The change of one category, to the left where it is faster; the whisker is its confidence interval."""

    name: str
    label: str
    value: str
    baseline: str
    candidate: str
    left: float
    width: float
    whisker_left: float | None
    whisker_width: float | None
    significant: str
    """``yes``, ``no`` or ``unknown``."""
    verdict: str
    faster: bool


@dataclass(frozen=True)
class Deltas:
    """The changes that add up to the change of the step time."""

    bars: tuple[DeltaBar, ...]
    zero: float
    total: DeltaBar
    hidden: str
    """Sum of the changes too small to draw; empty where there are none."""


@dataclass(frozen=True)
class Dots:
    """One run's steps on a common axis."""

    label: str
    places: tuple[float, ...]
    mean: float
    text: str


def run_bars(runs: Sequence[RunRow]) -> tuple[RunBar, ...]:
    """The time breakdown of every run's step, all on one scale."""
    longest = max((run.step_time_us for run in runs), default=0.0)
    bars = []
    for run in runs:
        place, segments = 0.0, []
        for name, us in run.categories_us.items():
            if us > 0 and us >= VISIBLE * longest:
                segments.append(
                    Segment(
                        name, 100 * place / longest, 100 * us / longest, f"{words.category_name(name)}: {duration(us)}"
                    )
                )
                place += us
        bars.append(RunBar(run.label, duration(run.step_time_us), tuple(segments)))
    return tuple(bars)


def deltas(difference: Difference) -> Deltas | None:
    """The change of each category; None where a recording has no time breakdown."""
    rows, step = difference.categories, difference.step
    if not rows:
        return None
    shown = [row for row in rows if row.significant or abs(row.delta_us) >= VISIBLE * step.baseline_us]
    rest = sum(row.delta_us for row in rows if row not in shown)
    whole = CategoryChange(
        name="step",
        baseline_us=step.baseline_us,
        candidate_us=step.candidate_us,
        low_us=step.low_us,
        high_us=step.high_us,
        significant=None if step.verdict == "unknown" else step.verdict != "same",
    )
    reach = 1.25 * max(abs(row.delta_us) for row in (*shown, whole)) or 1.0
    points = [0.0, *(row.delta_us for row in (*shown, whole))]
    points += [_clipped(end, reach) for row in (*shown, whole) for end in (row.low_us, row.high_us) if end is not None]
    low, high = min(points), max(points)
    span = (high - low) or 1.0

    def place(us: float) -> float:
        return 100 * (us - low) / span

    return Deltas(
        bars=tuple(
            _delta_bar(row, words.category_name(row.name), words.category_verdict(difference, row), place, reach)
            for row in shown
        ),
        zero=place(0.0),
        total=_delta_bar(whole, "Step time", words.verdict_word(whole.significant), place, reach),
        hidden=words.signed(rest) if len(shown) < len(rows) and abs(rest) >= 0.05 else "",
    )


def dots(runs: Sequence[RunRow]) -> tuple[tuple[Dots, ...], str, str] | None:
    """Every step of every run on one axis, and the two ends of the axis; None where no run has single steps."""
    times = [time for run in runs for time in run.step_time_us_per_step]
    if not times or max(times) == min(times):
        return None
    low, high = min(times), max(times)
    margin = 0.03 * (high - low)
    low, span = low - margin, high - low + 2 * margin
    rows = []
    for run in runs:
        values = run.step_time_us_per_step
        if values:
            stride = -(-len(values) // DOTS)
            places = tuple(round(100 * (time - low) / span, 2) for time in values[::stride])
            text = f"{len(values)} steps, {duration(min(values))} to {duration(max(values))}"
            rows.append(Dots(run.label, places, round(100 * (fmean(values) - low) / span, 2), text))
    return tuple(rows), duration(max(low, 0.0)), duration(low + span)


@dataclass(frozen=True)
class MetricTile:
    """One metric of the first screen."""

    label: str
    definition: str
    """Key in the definitions; may be without an entry."""
    baseline: str
    candidate: str
    change: str
    good: str
    """``yes``, ``no`` or empty where neither."""


def tiles(difference: Difference) -> list[MetricTile]:
    """The metrics of the first screen that at least one run has."""
    by_name = {change.name: change for change in difference.metrics}
    return [_tile(by_name[name], definition) for name, definition in _TILES.items() if name in by_name]


def _tile(change: MetricChange, definition: str) -> MetricTile:
    better = words.improved(change)
    is_noise = change.significant is not True and change.delta is not None
    moved = words.relative(change.baseline, change.candidate)
    if change.unit == "share" and known(change.delta):
        moved = f"{'−' if change.delta < 0 else '+'}{abs(change.delta) * 100:.1f} points"
    return MetricTile(
        label=words.LABELS[change.name],
        definition=definition,
        baseline=words.metric_value(change.baseline, change.unit),
        candidate=words.metric_value(change.candidate, change.unit),
        change=words.verdict_word(change.significant) if is_noise else moved,
        good="" if is_noise or better is None else "yes" if better else "no",
    )


def _delta_bar(
    row: CategoryChange, label: str, verdict: str, place: Callable[[float], float], reach: float
) -> DeltaBar:
    start, end = sorted((place(0.0), place(row.delta_us)))
    whisker = None
    if row.low_us is not None and row.high_us is not None:
        whisker = place(_clipped(row.low_us, reach)), place(_clipped(row.high_us, reach))
    return DeltaBar(
        name=row.name,
        label=label,
        value=words.signed(row.delta_us),
        baseline=duration(row.baseline_us),
        candidate=duration(row.candidate_us),
        left=start,
        width=end - start,
        whisker_left=whisker[0] if whisker else None,
        whisker_width=whisker[1] - whisker[0] if whisker else None,
        significant="unknown" if row.significant is None else "yes" if row.significant else "no",
        verdict=verdict,
        faster=row.delta_us < 0,
    )


def _clipped(us: float, reach: float) -> float:
    return min(max(us, -reach), reach)
