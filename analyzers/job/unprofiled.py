"""What a step takes without the profiler, where recorded runs timed such steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

from perfscope.recording.metadata import RunMetadata
from perfscope.results.rows import FEW_STEPS

_ODD: Final = 0.02
"""Share of the steps, the longest, that do not count: checkpoints, evaluations."""


def unprofiled_step_ns(runs: Mapping[int, RunMetadata]) -> float | None:
    """Mean wall time of an unprofiled step, the longest 2 % left out, of the slowest rank; None where fewer than 5 were
    timed: a job's first steps also warm up.

    The mean, because with busy loader workers some steps wait long and the others not at all.
    """
    timed = [run.steps.unprofiled_ns for run in runs.values() if len(run.steps.unprofiled_ns) >= FEW_STEPS]
    return max(map(_mean, timed), default=None)


def unprofiled_median_ns(runs: Mapping[int, RunMetadata]) -> float | None:
    """Median wall time of an unprofiled step, of the slowest rank: what profiled steps are compared with."""
    medians = [median(run.steps.unprofiled_ns) for run in runs.values() if run.steps.unprofiled_ns]
    return max(medians, default=None)


def _mean(steps_ns: Sequence[int]) -> float:
    usual = sorted(steps_ns)[: len(steps_ns) - int(_ODD * len(steps_ns))]
    return sum(usual) / len(usual)
