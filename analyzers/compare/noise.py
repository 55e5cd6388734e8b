"""Is a difference between two recordings more than noise? For the step time and each category of its breakdown.

One statistic decides, and is what the user sees: the difference of the means of the regular steps (``significance``),
and a range around it that is as wide as its confidence interval, or as the floor where that is wider; where all steps
of one recording are beyond all of the other, the range ends at least by the gap between them. A difference is
significant where its range excludes 0. The categories are measured on the same steps, so their differences add up to
the step's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.compare.sample import (
    StepSample,
    history_sample,
    regular_breakdown,
    regular_times,
    step_sample,
)
from perfscope.analyzers.compare.significance import holm, regular_steps, separation, welch_test
from perfscope.results.comparison import CategoryChange, StepChange
from perfscope.results.rows import FEW_STEPS
from perfscope.results.summary import Summary
from perfscope.text import duration
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
    first, second = step_sample(baseline), step_sample(candidate)
    delta = second.step_us - first.step_us
    smallest, smallest_from = _floor(first.step_us, baselines, floor)
    runs = _regular_run(baseline), _regular_run(candidate)
    chance = _by_chance((first.values, second.values), LEVEL, runs)
    noise = max(chance[0], smallest) if chance is not None else None
    confirmed = _confirmed(baseline, candidate, delta) if noise is not None and abs(delta) > noise else None
    if noise is not None and confirmed is False:
        # A change that the runs do not confirm is noise, however large.
        noise = max(noise, abs(delta))
    return StepChange(
        baseline_us=first.step_us,
        candidate_us=second.step_us,
        verdict=_verdict(delta, noise),
        low_us=delta - noise if noise is not None else None,
        high_us=delta + noise if noise is not None else None,
        p=chance[1] if chance is not None else None,
        floor_us=smallest,
        floor_from=smallest_from,
        noise_us=noise,
        baseline_mean_us=first.mean_us,
        candidate_mean_us=second.mean_us,
        baseline_steps=len(first.values),
        candidate_steps=len(second.values),
        why=_why(first, second, confirmed=confirmed),
        confirmed=confirmed,
        baseline_unprofiled_us=_beside_the_profiled(baseline),
        candidate_unprofiled_us=_beside_the_profiled(candidate),
    )


def _by_chance(
    pair: tuple[Float64, Float64], level: float, runs: tuple[Float64 | None, Float64 | None] = (None, None)
) -> tuple[float, float] | None:
    """(by how much the means of so many steps may differ by chance, at ``level``; how likely it is that they differ as
    much as they do); None below two steps. Samples that are apart, which is no chance, differ by the gap between them.
    """
    test, apart = welch_test(*pair, runs=runs), separation(*pair, runs=runs)
    if test is None:
        return None
    width = test.half_width(1 - level)
    if apart is None or apart.p >= level:
        return width, test.p
    return min(width, abs(test.delta) - apart.gap), min(test.p, apart.p)


def _beside_the_profiled(summary: Summary) -> float | None:
    """Unprofiled steps where others are compared; without a trace they are what is compared."""
    return summary.job.unprofiled_step_us if summary.job.steps else None


def _regular_run(summary: Summary) -> Float64 | None:
    """The regular steps of the run that were not profiled; None where they were not timed one by one."""
    if summary.history is None or any(each.first_step != each.last_step for each in summary.history.bins):
        return None
    run = history_sample(summary)
    return run[regular_steps(run)]


def _confirmed(baseline: Summary, candidate: Summary, delta: float) -> bool | None:
    """Do the steps that were not profiled differ in the same direction? None where too few of them were timed."""
    samples = history_sample(baseline), history_sample(candidate)
    if min(len(sample) for sample in samples) < _ENOUGH or not baseline.time_breakdown or not candidate.time_breakdown:
        return None
    test = welch_test(*(sample[regular_steps(sample)] for sample in samples))
    return test is not None and test.p < LEVEL and test.delta * delta > 0


def category_changes(baseline: Summary, candidate: Summary, step: StepChange) -> tuple[CategoryChange, ...]:
    """Each category's change, tested step by step; the chance of any false alarm among them is below ``LEVEL``.

    Bonferroni's correction, over the categories that either job has: only with it do ranges and verdicts agree.
    """
    samples = step_sample(baseline), step_sample(candidate)
    first, second = regular_breakdown(baseline, samples[0]), regular_breakdown(candidate, samples[1])
    if not first or not second:
        return ()
    level = LEVEL / max(sum(first[name] != 0 or second[name] != 0 for name in first), 1)
    changes = []
    for name in first:
        delta = second[name] - first[name]
        pair = (regular_times(baseline, samples[0], name), regular_times(candidate, samples[1], name))
        low, high, significant = within(delta, noise_of_part(pair, level, step))
        changes.append(
            CategoryChange(
                name=name,
                baseline_us=first[name],
                candidate_us=second[name],
                low_us=low,
                high_us=high,
                significant=significant,
            )
        )
    return tuple(changes)


def within(delta_us: float, noise_us: float | None) -> tuple[float | None, float | None, bool | None]:
    """(low, high, significant) of a change: its range, and whether that excludes 0; None where no noise is known."""
    if noise_us is None:
        return None, None, None
    return delta_us - noise_us, delta_us + noise_us, abs(delta_us) > noise_us


def noise_of_part(pair: tuple[Float64, Float64], level: float, step: StepChange) -> float | None:
    """What a part's change must exceed, µs: half of its interval, at least the floor; the whole step's noise where the
    part has no times of single steps.
    """
    chance = _by_chance(pair, level)
    return max(chance[0], part_floor(step)) if chance is not None else step.noise_us


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
    tests = {
        index: test
        for index, pair in enumerate(pairs)
        if (test := welch_test(*(times[regular_steps(times)] for times in pair))) is not None
    }
    significant = dict(zip(tests, holm([test.p for test in tests.values()], LEVEL), strict=True))
    return [
        significant[index]
        and abs(delta) >= max(part_floor(step), OWN_SHARE * size)
        # An odd step may turn the mean of all steps around.
        and tests[index].delta * delta >= 0
        if index in significant
        else beyond_noise(delta, step)
        for index, (delta, size) in enumerate(zip(changes, sizes, strict=True))
    ]


def categories_differ(baseline: Summary, candidate: Summary, names: Sequence[str], step: StepChange) -> bool | None:
    """Has the sum of these categories changed significantly? None where that cannot be judged."""
    samples = step_sample(baseline), step_sample(candidate)
    first, second = regular_breakdown(baseline, samples[0]), regular_breakdown(candidate, samples[1])
    if not first or not second:
        return None
    delta = sum(second[name] - first[name] for name in names)
    sums = (
        _sum_of([regular_times(baseline, samples[0], name) for name in names]),
        _sum_of([regular_times(candidate, samples[1], name) for name in names]),
    )
    noise = noise_of_part(sums, LEVEL, step)
    return abs(delta) > noise if noise is not None else None


def _sum_of(rows: Sequence[Float64]) -> Float64:
    return np.sum(rows, axis=0) if all(len(row) == len(rows[0]) for row in rows) else np.zeros(0)


def _floor(step_us: float, baselines: Sequence[Summary], floor: float) -> tuple[float, str]:
    times = [step_sample(summary).step_us for summary in baselines] + [step_us]
    spread = max(times) - min(times)
    if spread > floor * step_us:
        return spread, f"the {len(times)} recordings of the baseline differ by this much"
    return floor * step_us, f"{100 * floor:.3g}% of the step; runs of the same job may differ by this much"


def _verdict(delta: float, noise: float | None) -> str:
    if noise is None:
        return "unknown"
    return "same" if abs(delta) <= noise else "faster" if delta < 0 else "slower"


def _why(baseline: StepSample, candidate: StepSample, *, confirmed: bool | None) -> str:
    first, second = len(baseline.values), len(candidate.values)
    fewest = min(first, second)
    if fewest < 2:
        which = "Both recordings have" if max(first, second) < 2 else "One recording has"
        return f"{which} fewer than two steps, too few to judge. Record at least {FEW_STEPS} steps of each."
    counts = f"{first} baseline and {second} candidate steps"
    odd = _left_out(baseline, candidate)
    if min(len(baseline.times), len(candidate.times)) < FEW_STEPS:
        return f"Low confidence: only {counts}; record at least {FEW_STEPS} of each, better 20.{odd}"
    if confirmed is False:
        return (
            f"{counts} differ, but the steps of the same runs that were not profiled do not, or not so: the "
            f"recorded steps are not typical. Record more steps, or several captures.{odd}"
        )
    confirmation = "; the steps that were not profiled confirm it" if confirmed else ""
    return f"{counts}; 99% confidence{confirmation}.{odd}"


def _left_out(baseline: StepSample, candidate: StepSample) -> str:
    """The odd steps, in a sentence; empty without any."""
    named = [
        f"{', '.join(duration(us) for us in sample.odd)} in the {which}"
        for sample, which in ((baseline, "baseline"), (candidate, "candidate"))
        if sample.odd
    ]
    return f" Left out, far from the other steps: {' and '.join(named)}." if named else ""
