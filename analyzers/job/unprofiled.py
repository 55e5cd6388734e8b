"""What a step takes without the profiler, where recorded runs timed such steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.frozen import dataclass
from perfscope.recording.metadata import RunMetadata
from perfscope.results.rows import FEW_STEPS

_ODD: Final = 0.02
"""Share of the steps, the longest, that do not count: checkpoints, evaluations."""
_MORE: Final = 2.0
"""At most so many times the recorded share of steps with an evaluation are taken for such: few steps were recorded."""


@dataclass(frozen=True)
class _Evaluations:
    """Recorded steps that were left out because the model was evaluated in them."""

    longer: float
    """A step with an evaluation, as a multiple of one without."""
    share: float
    """Of the recorded steps."""


def unprofiled_step_ns(runs: Mapping[int, RunMetadata], result: AlignedJob) -> float | None:
    """Mean wall time of an unprofiled step, the longest 2 % left out, of the slowest rank; None where steps are not
    marked, or fewer than 5 were timed: a job's first steps also warm up.

    The mean, because with busy loader workers some steps wait long and the others not at all. Where recorded steps are
    left out because the model is evaluated in them, so are unprofiled ones that are about as long.
    """
    if not result.is_marked:
        return None
    evaluations = _evaluations(result)
    timed = [run.steps.unprofiled_ns for run in runs.values() if len(run.steps.unprofiled_ns) >= FEW_STEPS]
    return max((_mean(_without(evaluations, steps)) for steps in timed), default=None)


def unprofiled_median_ns(runs: Mapping[int, RunMetadata]) -> float | None:
    """Median wall time of an unprofiled step, of the slowest rank: what profiled steps are compared with."""
    medians = [median(run.steps.unprofiled_ns) for run in runs.values() if run.steps.unprofiled_ns]
    return max(medians, default=None)


def _evaluations(result: AlignedJob) -> _Evaluations | None:
    """None where every recorded step counts, or steps with an evaluation are no longer than others."""
    left_out = np.setdiff1d(result.evaluated, result.steps)
    if not len(left_out):
        return None
    longer = max(
        float(np.median(took[steps.indices_of(left_out)]) / max(np.median(took[steps.indices_of(result.steps)]), 1))
        for steps in (partial.steps for partial in result.partials.values())
        for took in (steps.host_end_ns - steps.host_start_ns,)
    )
    share = len(left_out) / (len(left_out) + len(result.steps))
    return _Evaluations(longer, share) if longer > 1 else None


def _without(evaluations: _Evaluations | None, steps_ns: Sequence[int]) -> Sequence[int]:
    """The steps that are nearer to a usual one than to one with an evaluation."""
    if evaluations is None:
        return steps_ns
    usual, most = median(steps_ns), ceil(_MORE * evaluations.share * len(steps_ns))
    in_order = sorted(steps_ns)
    nearer = sum(step <= usual * (1 + evaluations.longer) / 2 for step in in_order)
    return in_order[: max(nearer, len(in_order) - most)]


def _mean(steps_ns: Sequence[int]) -> float:
    usual = sorted(steps_ns)[: len(steps_ns) - int(_ODD * len(steps_ns))]
    return sum(usual) / len(usual)
