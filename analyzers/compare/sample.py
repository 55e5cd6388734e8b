"""What is compared of a recording: the times of its regular steps, and the time breakdown of the same steps."""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.analyzers.compare.significance import regular_steps
from perfscope.frozen import dataclass
from perfscope.results.comparison import BETWEEN_RANKS
from perfscope.results.summary import Summary
from perfscope.trace.trace import Bool, Float64

_AS_MUCH: Final = 0.95
"""Share of the regular steps' compute from which a step computes as much as they do."""


@dataclass(frozen=True, eq=False)
class StepSample:
    """A recording's steps. ``times`` (µs) and ``regular`` are parallel arrays; empty where no step was timed alone."""

    times: Float64
    regular: Bool
    mean_us: float
    """The job's step time: the mean of all steps."""

    @property
    def values(self) -> Float64:
        """Times of the regular steps, µs."""
        return self.times[self.regular]

    @property
    def step_us(self) -> float:
        """Mean of the regular steps; the job's step time where no step was timed alone."""
        return float(self.values.mean()) if len(self.times) else self.mean_us

    @property
    def odd(self) -> tuple[float, ...]:
        """Times of the steps left out, µs."""
        return tuple(self.times[~self.regular].tolist())


def step_sample(summary: Summary) -> StepSample:
    """Single steps; where no trace was recorded, the medians of the history's bins.

    Bins (batch means) are nearly independent, which single steps of a long run are not.
    """
    job = summary.job
    if job.step_time_us_per_step and job.steps:
        times = np.array(job.step_time_us_per_step)
        # Without a breakdown of each step, only all of them together have one.
        regular = np.ones(len(times), dtype=np.bool_)
        if _splits(summary, times):
            regular = regular_steps(times)
            regular |= _quick_but_whole(summary, times, regular)
        return StepSample(times, regular, job.step_time_us)
    times = history_sample(summary) if not summary.time_breakdown else np.zeros(0)
    return StepSample(times, np.ones(len(times), dtype=np.bool_), job.step_time_us)


def _quick_but_whole(summary: Summary, times: Float64, regular: Bool) -> Bool:
    """Which quicker steps compute as much as the regular ones: they did not have to wait, as for a loader that still
    has batches ready. One that is cut by the recording's end computes less.
    """
    compute = row_times(summary, "compute")
    if len(compute) != len(times) or regular.all():
        return np.zeros(len(times), dtype=np.bool_)
    whole: Bool = (times < times[regular].min()) & (compute >= _AS_MUCH * float(np.median(compute[regular])))
    return whole


def _splits(summary: Summary, times: Float64) -> bool:
    """Whether the time breakdown of each step is known, in every category that has any time."""
    per_step = summary.job.time_breakdown_us_per_step
    needed = {name for row in summary.time_breakdown for name, us in row.categories().items() if us}
    return needed <= set(per_step) and all(len(row) == len(times) for row in per_step.values())


def history_sample(summary: Summary) -> Float64:
    """Medians of the history's bins, µs, without the steps around captures; empty without a history."""
    return np.array([entry.median_us for entry in summary.history.bins]) if summary.history is not None else np.zeros(0)


def breakdown_of(summary: Summary) -> dict[str, float]:
    """Time breakdown, mean over ranks, and ``BETWEEN_RANKS``: they add up to the step time. Empty without ranks."""
    rows = summary.time_breakdown
    if not rows:
        return {}
    mean = {name: sum(row.categories()[name] for row in rows) / len(rows) for name in rows[0].categories()}
    return {**mean, BETWEEN_RANKS: summary.job.step_time_us - sum(mean.values())}


def regular_breakdown(summary: Summary, sample: StepSample) -> dict[str, float]:
    """``breakdown_of`` the regular steps: it adds up to ``sample.step_us``. Empty without ranks."""
    whole = breakdown_of(summary)
    if sample.regular.all():
        return whole
    times = {name: regular_times(summary, sample, name) for name in whole}
    return {name: float(own.mean()) if len(own) else 0.0 for name, own in times.items()}


def row_times(summary: Summary, name: str) -> Float64:
    """One category in each step, µs, mean over ranks; empty where that is not known."""
    per_step = summary.job.time_breakdown_us_per_step
    if name != BETWEEN_RANKS:
        return np.array(per_step.get(name, ()))
    times = np.array(summary.job.step_time_us_per_step)
    rows = [np.array(values) for values in per_step.values() if len(values) == len(times)]
    return times - np.sum(rows, axis=0) if rows else np.zeros(0)


def regular_times(summary: Summary, sample: StepSample, name: str) -> Float64:
    """``row_times`` of the regular steps."""
    times = row_times(summary, name)
    return times[sample.regular] if len(times) == len(sample.regular) else times
