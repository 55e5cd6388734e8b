"""Is a difference between two recordings more than noise? Of the step time, and of each row of the account."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Final, TypeVar

import numpy as np

from perfscope.analyzers.difference.significance import Difference, difference, holm
from perfscope.comparison import BETWEEN_RANKS, RowChange, StepChange
from perfscope.summary import Summary
from perfscope.trace import Float64

_Part = TypeVar("_Part", bound=Hashable)

LEVEL: Final = 0.01
"""Chance of a false alarm that a test may have."""

FLOOR: Final = 0.02
"""Share of the step below which no difference is claimed: starts of one job differ by that much (placement, clocks,
allocator), which the steps of one recording cannot show."""

ROW_FLOOR: Final = 0.005
"""The same for one row of the account, which is a part of the step."""

OWN_SHARE: Final = 0.02
"""Share of its own time by which a kernel, an operator, a collective or a rank must change besides: clocks and cache
luck differ between starts of a job."""

_ENOUGH: Final = 8
"""Stretches of a run, or steps, from which they can confirm what the recorded steps show."""

FEW_STEPS: Final = 5
"""Below this many steps on either side, certainty is called low."""

_NO_STEPS = "the step time cannot be judged"


def step_change(before: Summary, after: Summary, baselines: Sequence[Summary] = (), floor: float = FLOOR) -> StepChange:
    """The step time before and after. ``baselines`` are further recordings of the first job."""
    first, second = before.job.step_time_us, after.job.step_time_us
    delta = second - first
    samples = step_times(before), step_times(after)
    smallest, smallest_from = _floor(first, baselines, floor)
    test = difference(*samples)
    half = test.means.half_width(1 - LEVEL) if test is not None else None
    verdict = _verdict(delta, smallest, test)
    confirmed = _confirmed(before, after, delta) if verdict in ("faster", "slower") else None
    noise = max(half, smallest) if half is not None else None
    return StepChange(
        before_us=first,
        after_us=second,
        delta_us=delta,
        verdict="same" if confirmed is False else verdict,
        low_us=delta - half if half is not None else None,
        high_us=delta + half if half is not None else None,
        p=test.p if test is not None else None,
        typical_delta_us=test.trimmed.delta if test is not None else None,
        floor_us=smallest,
        floor_from=smallest_from,
        # What the runs do not confirm is noise, as large as it is.
        noise_us=max(noise, abs(delta)) if noise is not None and confirmed is False else noise,
        steps_before=len(samples[0]),
        steps_after=len(samples[1]),
        why=_why(*samples, confirmed=confirmed),
        confirmed=confirmed,
        unprofiled_before_us=before.job.unprofiled_step_us,
        unprofiled_after_us=after.job.unprofiled_step_us,
    )


def step_times(summary: Summary) -> Float64:
    """Times of single steps, µs; where no trace was recorded, medians of stretches of the whole run.

    Such stretches (batch means) are near enough to independent, which single steps of a long run are not.
    """
    if summary.job.step_time_us_per_step and summary.job.steps:
        return np.array(summary.job.step_time_us_per_step)
    return _history(summary) if not summary.accounting else np.zeros(0)


def _history(summary: Summary) -> Float64:
    """Medians of stretches of the whole run, the steps around captures left out."""
    return np.array([entry.median_us for entry in summary.history.bins]) if summary.history is not None else np.zeros(0)


def _confirmed(before: Summary, after: Summary, delta: float) -> bool | None:
    """Do the steps outside of the recordings differ in the same direction? None where they are few, or the samples."""
    samples = _history(before), _history(after)
    if min(len(sample) for sample in samples) < _ENOUGH or not before.accounting or not after.accounting:
        return None
    test = difference(*samples)
    return test is not None and test.p < LEVEL and test.trimmed.delta * delta > 0


def rows_of(summary: Summary) -> dict[str, float]:
    """Rows of the account, mean over ranks, and what the slowest rank's step exceeds that by: they add up to it."""
    rows = summary.accounting
    if not rows:
        return {}
    mean = {name: sum(row.rows()[name] for row in rows) / len(rows) for name in rows[0].rows()}
    return {**mean, BETWEEN_RANKS: summary.job.step_time_us - sum(mean.values())}


def row_changes(before: Summary, after: Summary, step: StepChange) -> tuple[RowChange, ...]:
    """Every row's change, each tested step by step; together they have a chance of ``LEVEL`` of a false alarm."""
    first, second = rows_of(before), rows_of(after)
    if not first or not second:
        return ()
    tests = {name: difference(_row_times(before, name), _row_times(after, name)) for name in first}
    held = _held(tests)
    changes = []
    for name in first:
        delta, test = second[name] - first[name], tests[name]
        half = test.means.half_width(1 - LEVEL) if test is not None else None
        changes.append(
            RowChange(
                name=name,
                before_us=first[name],
                after_us=second[name],
                delta_us=delta,
                low_us=delta - half if half is not None else None,
                high_us=delta + half if half is not None else None,
                real=held[name] and abs(delta) >= row_floor(step) if name in held else beyond_noise(delta, step),
            )
        )
    return tuple(changes)


def row_floor(step: StepChange) -> float:
    """What the change of a part of the step must exceed, µs.

    Where the recorded stretches are not typical of their runs, parts must have moved against one another to be named.
    """
    return 2 * (step.noise_us or 0.0) if step.confirmed is False else ROW_FLOOR * step.before_us


def beyond_noise(delta_us: float, step: StepChange) -> bool | None:
    """Is a part's change more than the whole step's noise? For what was not recorded step by step: a strict measure."""
    return None if step.noise_us is None else abs(delta_us) > step.noise_us


def parts_are_real(
    pairs: Sequence[tuple[Float64, Float64]], changes: Sequence[float], sizes: Sequence[float], step: StepChange
) -> list[bool | None]:
    """Which parts of a step changed beyond the noise: each by its own times, before and after, step by step.

    ``changes`` and ``sizes`` (the larger of before and after) in µs per step. All together have a chance of ``LEVEL``
    of a false alarm (Holm); a part must also move by ``row_floor`` and by ``OWN_SHARE`` of itself. Those that a
    recording does not hold step by step must exceed the whole step's noise.
    """
    held = _held({index: difference(*pair) for index, pair in enumerate(pairs)})
    return [
        held[index] and abs(delta) >= max(row_floor(step), OWN_SHARE * size)
        if index in held
        else beyond_noise(delta, step)
        for index, (delta, size) in enumerate(zip(changes, sizes, strict=True))
    ]


def _held(tests: Mapping[_Part, Difference | None]) -> dict[_Part, bool]:
    """Which tests hold, of those that could be made, when all of them together may be wrong with chance ``LEVEL``."""
    made = {part: test for part, test in tests.items() if test is not None}
    return dict(zip(made, holm([test.p for test in made.values()], LEVEL), strict=True))


def rows_differ(before: Summary, after: Summary, names: Sequence[str], step: StepChange) -> bool | None:
    """Have these rows of the account together changed beyond the noise? None where that cannot be judged."""
    first, second = rows_of(before), rows_of(after)
    if not first or not second:
        return None
    delta = sum(second[name] - first[name] for name in names)
    sums = [_sum_of([_row_times(summary, name) for name in names]) for summary in (before, after)]
    test = difference(*sums)
    if test is None:
        return beyond_noise(delta, step)
    return test.p < LEVEL and abs(delta) >= row_floor(step)


def _sum_of(rows: Sequence[Float64]) -> Float64:
    return np.sum(rows, axis=0) if all(len(row) == len(rows[0]) for row in rows) else np.zeros(0)


def _row_times(summary: Summary, name: str) -> Float64:
    per_step = summary.job.account_us_per_step
    if name != BETWEEN_RANKS:
        return np.array(per_step.get(name, ()))
    times = np.array(summary.job.step_time_us_per_step)
    rows = [np.array(values) for values in per_step.values() if len(values) == len(times)]
    return times - np.sum(rows, axis=0) if rows else np.zeros(0)


def _floor(step_us: float, baselines: Sequence[Summary], floor: float) -> tuple[float, str]:
    times = [summary.job.step_time_us for summary in baselines] + [step_us]
    spread = max(times) - min(times)
    if spread > floor * step_us:
        return spread, f"the {len(times)} recordings of the first job differ by that much"
    return floor * step_us, f"{100 * floor:.3g}% of the step, by which starts of one job may differ"


def _verdict(delta: float, floor: float, test: Difference | None) -> str:
    """Of the step time: a difference of the means, or of the typical steps where odd ones drown that of the means."""
    if test is None:
        return "unknown"
    if test.p >= LEVEL or abs(delta) < floor or abs(test.trimmed.delta) < floor or delta * test.trimmed.delta < 0:
        return "same"
    return "faster" if delta < 0 else "slower"


def _why(before: Float64, after: Float64, *, confirmed: bool | None) -> str:
    fewest = min(len(before), len(after))
    if fewest < 2:
        which = "either recording" if max(len(before), len(after)) < 2 else "one of the recordings"
        return f"Fewer than two steps in {which}: {_NO_STEPS}. Record at least {FEW_STEPS} steps of each."
    told = f"{len(before)} steps before, {len(after)} after"
    if fewest < FEW_STEPS:
        return f"Low certainty: only {told}; record at least {FEW_STEPS} of each, better 20."
    if confirmed is False:
        return (
            f"{told[0].upper()}{told[1:]} differ, but the steps of the same runs that were not recorded do not: the "
            "recorded stretches are not typical. Record more steps, or at several times."
        )
    sure = "; the steps that were not recorded confirm it" if confirmed else ""
    return f"{told[0].upper()}{told[1:]}; 99% confidence{sure}."
