"""Is a difference between two recordings more than noise? For the step time and each category of its breakdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.compare.significance import TwoSampleTest, holm, two_sample_test
from perfscope.results.comparison import BETWEEN_RANKS, CategoryChange, StepChange
from perfscope.results.rows import FEW_STEPS
from perfscope.results.summary import Summary
from perfscope.trace.trace import Float64

LEVEL: Final = 0.01
"""Significance level: the chance of a false alarm that a test may have."""

FLOOR: Final = 0.02
"""Share of the step below which no difference is significant: runs of one job differ by this much (placement, clocks,
allocator), which the steps of one recording cannot show."""

PART_FLOOR: Final = 0.005
"""The same for a part of the step, such as one category of the time breakdown."""

OWN_SHARE: Final = 0.02
"""Share of its own time by which a kernel, an operator, a collective or a rank must change as well: clocks and cache
hits differ between runs of a job."""

_ENOUGH: Final = 8
"""History bins of a run needed to confirm what the recorded steps show."""


def step_change(
    baseline: Summary, candidate: Summary, baselines: Sequence[Summary] = (), floor: float = FLOOR
) -> StepChange:
    """The step time of both. ``baselines`` are further recordings of the baseline's job."""
    first, second = baseline.job.step_time_us, candidate.job.step_time_us
    delta = second - first
    samples = step_times(baseline), step_times(candidate)
    smallest, smallest_from = _floor(first, baselines, floor)
    test = two_sample_test(*samples)
    half = test.means.half_width(1 - LEVEL) if test is not None else None
    verdict = _verdict(delta, smallest, test)
    confirmed = _confirmed(baseline, candidate, delta) if verdict in ("faster", "slower") else None
    noise = max(half, smallest) if half is not None else None
    return StepChange(
        baseline_us=first,
        candidate_us=second,
        verdict="same" if confirmed is False else verdict,
        low_us=delta - half if half is not None else None,
        high_us=delta + half if half is not None else None,
        p=test.p if test is not None else None,
        typical_delta_us=test.trimmed.delta if test is not None else None,
        floor_us=smallest,
        floor_from=smallest_from,
        # A change that the runs do not confirm is noise, however large.
        noise_us=max(noise, abs(delta)) if noise is not None and confirmed is False else noise,
        baseline_steps=len(samples[0]),
        candidate_steps=len(samples[1]),
        why=_why(*samples, confirmed=confirmed),
        confirmed=confirmed,
        baseline_unprofiled_us=baseline.job.unprofiled_step_us,
        candidate_unprofiled_us=candidate.job.unprofiled_step_us,
    )


def step_times(summary: Summary) -> Float64:
    """Times of single steps, µs; where no trace was recorded, the medians of the history's bins.

    Bins (batch means) are nearly independent, which single steps of a long run are not.
    """
    if summary.job.step_time_us_per_step and summary.job.steps:
        return np.array(summary.job.step_time_us_per_step)
    return _history(summary) if not summary.time_breakdown else np.zeros(0)


def _history(summary: Summary) -> Float64:
    """Medians of the history's bins, µs, without the steps around captures; empty without a history."""
    return np.array([entry.median_us for entry in summary.history.bins]) if summary.history is not None else np.zeros(0)


def _confirmed(baseline: Summary, candidate: Summary, delta: float) -> bool | None:
    """Do the steps that were not profiled differ in the same direction? None where too few of them were timed."""
    samples = _history(baseline), _history(candidate)
    if min(len(sample) for sample in samples) < _ENOUGH or not baseline.time_breakdown or not candidate.time_breakdown:
        return None
    test = two_sample_test(*samples)
    return test is not None and test.p < LEVEL and test.trimmed.delta * delta > 0


def breakdown_of(summary: Summary) -> dict[str, float]:
    """Time breakdown, mean over ranks, and ``BETWEEN_RANKS``: they add up to the step time. Empty without ranks."""
    rows = summary.time_breakdown
    if not rows:
        return {}
    mean = {name: sum(row.categories()[name] for row in rows) / len(rows) for name in rows[0].categories()}
    return {**mean, BETWEEN_RANKS: summary.job.step_time_us - sum(mean.values())}


def category_changes(baseline: Summary, candidate: Summary, step: StepChange) -> tuple[CategoryChange, ...]:
    """Each category's change, tested step by step; the chance of any false alarm among them is below ``LEVEL``."""
    first, second = breakdown_of(baseline), breakdown_of(candidate)
    if not first or not second:
        return ()
    pairs = [(_row_times(baseline, name), _row_times(candidate, name)) for name in first]
    deltas = [second[name] - first[name] for name in first]
    significant = significant_parts(pairs, deltas, [0.0] * len(deltas), step)
    changes = []
    for name, pair, delta, is_significant in zip(first, pairs, deltas, significant, strict=True):
        test = two_sample_test(*pair)
        half = test.means.half_width(1 - LEVEL) if test is not None else None
        changes.append(
            CategoryChange(
                name=name,
                baseline_us=first[name],
                candidate_us=second[name],
                low_us=delta - half if half is not None else None,
                high_us=delta + half if half is not None else None,
                significant=is_significant,
            )
        )
    return tuple(changes)


def part_floor(step: StepChange) -> float:
    """The change of a part of the step must exceed this, µs.

    It is higher where the recorded steps are not typical of their runs: there only parts that changed against one
    another count.
    """
    return 2 * (step.noise_us or 0.0) if step.confirmed is False else PART_FLOOR * step.baseline_us


def beyond_noise(delta_us: float, step: StepChange) -> bool | None:
    """Is a part's change more than the whole step's noise? A strict measure, for parts without a time for each step."""
    return None if step.noise_us is None else abs(delta_us) > step.noise_us


def significant_parts(
    pairs: Sequence[tuple[Float64, Float64]], changes: Sequence[float], sizes: Sequence[float], step: StepChange
) -> list[bool | None]:
    """Which parts of a step changed significantly, each tested by its own times in each step of baseline and candidate.

    ``changes`` and ``sizes`` (the larger of both times, or 0) are µs per step. The chance of any false alarm is below
    ``LEVEL`` (Holm); a part must also change by ``part_floor`` and by ``OWN_SHARE`` of its size. A part without times
    for each step must exceed the whole step's noise.
    """
    tests = {index: test for index, pair in enumerate(pairs) if (test := two_sample_test(*pair)) is not None}
    significant = dict(zip(tests, holm([test.p for test in tests.values()], LEVEL), strict=True))
    return [
        significant[index] and abs(delta) >= max(part_floor(step), OWN_SHARE * size)
        if index in significant
        else beyond_noise(delta, step)
        for index, (delta, size) in enumerate(zip(changes, sizes, strict=True))
    ]


def categories_differ(baseline: Summary, candidate: Summary, names: Sequence[str], step: StepChange) -> bool | None:
    """Has the sum of these categories changed significantly? None where that cannot be judged."""
    first, second = breakdown_of(baseline), breakdown_of(candidate)
    if not first or not second:
        return None
    delta = sum(second[name] - first[name] for name in names)
    sums = [_sum_of([_row_times(summary, name) for name in names]) for summary in (baseline, candidate)]
    test = two_sample_test(*sums)
    if test is None:
        return beyond_noise(delta, step)
    return test.p < LEVEL and abs(delta) >= part_floor(step)


def _sum_of(rows: Sequence[Float64]) -> Float64:
    return np.sum(rows, axis=0) if all(len(row) == len(rows[0]) for row in rows) else np.zeros(0)


def _row_times(summary: Summary, name: str) -> Float64:
    per_step = summary.job.time_breakdown_us_per_step
    if name != BETWEEN_RANKS:
        return np.array(per_step.get(name, ()))
    times = np.array(summary.job.step_time_us_per_step)
    rows = [np.array(values) for values in per_step.values() if len(values) == len(times)]
    return times - np.sum(rows, axis=0) if rows else np.zeros(0)


def _floor(step_us: float, baselines: Sequence[Summary], floor: float) -> tuple[float, str]:
    times = [summary.job.step_time_us for summary in baselines] + [step_us]
    spread = max(times) - min(times)
    if spread > floor * step_us:
        return spread, f"the {len(times)} recordings of the baseline differ by this much"
    return floor * step_us, f"{100 * floor:.3g}% of the step; runs of the same job may differ by this much"


def _verdict(delta: float, floor: float, test: TwoSampleTest | None) -> str:
    """Of the step time: by the means, or by the trimmed means where outliers hide a difference of the means."""
    if test is None:
        return "unknown"
    if test.p >= LEVEL or abs(delta) < floor or abs(test.trimmed.delta) < floor or delta * test.trimmed.delta < 0:
        return "same"
    return "faster" if delta < 0 else "slower"


def _why(baseline: Float64, candidate: Float64, *, confirmed: bool | None) -> str:
    fewest = min(len(baseline), len(candidate))
    if fewest < 2:
        which = "Both recordings have" if max(len(baseline), len(candidate)) < 2 else "One recording has"
        return f"{which} fewer than two steps, too few to judge. Record at least {FEW_STEPS} steps of each."
    counts = f"{len(baseline)} baseline and {len(candidate)} candidate steps"
    if fewest < FEW_STEPS:
        return f"Low confidence: only {counts}; record at least {FEW_STEPS} of each, better 20."
    if confirmed is False:
        return (
            f"{counts} differ, but the steps of the same runs that were not profiled do not: the recorded steps are "
            "not typical. Record more steps, or several captures."
        )
    confirmation = "; the steps that were not profiled confirm it" if confirmed else ""
    return f"{counts}; 99% confidence{confirmation}."
