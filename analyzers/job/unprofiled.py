"""What a step takes without the profiler, where recorded runs timed such steps.

The batches of a few recorded steps may be ready: loader workers had time while the profiler started, and more where it
is slow. In the long run steps are as long as the workers take for their batches. Example: two workers take 170 ms for a
batch and have four of them ready. The next steps take 45 ms each, all others 85.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.frozen import dataclass
from perfscope.recording.metadata import RunMetadata
from perfscope.results.categories import TimeCategory
from perfscope.results.rows import FEW_STEPS
from perfscope.trace.trace import Bool, Float64, Int64

_ODD: Final = 0.02
"""Share of the steps, the longest, that do not count: a checkpoint, an evaluation."""
LONG: Final = 1.5
"""Times the median from which a step is long."""
_AS_LONG: Final = 0.3
"""Part of what the third longest of them is longer by from which others are such, too."""
_MANY: Final = 20
"""Unprofiled steps that tell how often such steps come."""
_FEW: Final = 0.25
"""Share of the unprofiled steps that they are, at most, and half of that of the recorded ones."""
_MORE: Final = 2.0
"""At most so many times the recorded share of steps with an evaluation are taken for such: few steps were recorded."""

_FEWER: Final = 3
_SLOWED: Final = 0.9
"""So many unprofiled steps tell something where each is shorter than this share of any recorded one: so much no warm-up
and no full queue of batches explains."""
_AHEAD: Final = 3
_SHORTER: Final = 0.8
"""In up to so many first steps after a capture a host runs ahead of its device, and takes less than this share of what
any later step takes."""
_OF_DEVICE: Final = [TimeCategory.COMPUTE, TimeCategory.COPY]
_WHOLE: Final = 0.97
"""Share of the device's work in a step that an unprofiled one takes at least, by its host."""

_PACED: Final = 0.9
"""Share of an unprofiled step that its batches take the workers from which these set its pace."""
_READY: Final = 0.75
"""Share of the mean unprofiled step up to which one has its batches ready: workers deliver several in a row."""
_SEVERAL: Final = 3
"""Such steps that show what one takes."""
_WAIT: Final = 0.05
"""Least share of an unprofiled step that is waiting for workers."""
_SHOWN: Final = 0.5
"""Part of that wait from which the recorded steps show it."""


@dataclass(frozen=True)
class _Evaluations:
    """Recorded steps that were left out because the model was evaluated in them."""

    longer: float
    """A step with an evaluation, as a multiple of one without."""
    share: float
    """Of the recorded steps."""
    of_long: float
    """Of the recorded steps that are as long: others may save a checkpoint."""


def unprofiled_step_ns(runs: Mapping[int, RunMetadata], result: AlignedJob) -> float | None:
    """Mean wall time of an unprofiled step, the longest 2 % left out, of the slowest rank; None where steps are not
    marked, or fewer than 5 were timed: a job's first steps also warm up. Of three or four the mean counts where each is
    far shorter than any recorded one, which the profiler slows.

    The mean, because with busy loader workers some steps wait long and the others not at all. Where recorded steps are
    left out because the model is evaluated in them, so are unprofiled ones that are about as long.
    """
    if not result.is_marked:
        return None
    evaluations = _evaluations(result)
    timed = _timed(runs, result)
    return max((_mean(_without(evaluations, steps)) for steps in timed), default=None)


def _timed(runs: Mapping[int, RunMetadata], result: AlignedJob) -> list[Sequence[int]]:
    """Of each rank with enough unprofiled steps, how long they took."""
    start, end = result.job_windows
    most = _SLOWED * float((end - start).min())
    usable = _usable(runs, result)
    return [steps for steps in usable if len(steps) >= FEW_STEPS or (len(steps) >= _FEWER and max(steps) < most)]


def _usable(runs: Mapping[int, RunMetadata], result: AlignedJob) -> list[Sequence[int]]:
    """Unprofiled steps of the ranks whose host tells how long they took.

    Steps are timed on the host, which may run ahead of its device: then it takes less for a step than the device, until
    the queue is full. What the recorded kernels take is what a step takes at least.
    """
    usable: list[Sequence[int]] = []
    for rank, run in runs.items():
        steps: Sequence[int] = run.steps.unprofiled_ns
        partial = result.partials.get(rank)
        if partial is not None and partial.has_device_work:
            steps = _settled(steps)
            work_ns = result.totals[rank][:, _OF_DEVICE].sum(axis=1).mean()
            if not steps or np.mean(steps) < _WHOLE * work_ns:
                continue
        usable.append(steps)
    return usable


def _settled(steps_ns: Sequence[int]) -> Sequence[int]:
    """Without the first steps in which the host runs ahead of its device: each is shorter than all that follow."""
    for first in range(min(_AHEAD, len(steps_ns) - _FEWER), 0, -1):
        if max(steps_ns[:first]) < _SHORTER * min(steps_ns[first:]):
            return steps_ns[first:]
    return steps_ns


@dataclass(frozen=True, eq=False)
class LongStepShare:
    """Steps far longer than most, as those that save a checkpoint: a few recorded steps hold more or fewer of them than
    they are of the unprofiled ones.
    """

    recorded: Bool
    """Which of the used steps are so."""
    share: float
    """Of the unprofiled steps."""
    longer_ns: float
    """What one takes longer, without the profiler."""
    step_ns: float
    """The mean unprofiled step, were there as many of them as among the recorded ones."""


def long_step_share(runs: Mapping[int, RunMetadata], result: AlignedJob) -> LongStepShare | None:
    """Those of the slowest rank; None without any, where they are no exception, and where fewer than ``_MANY``
    unprofiled steps were timed. Steps that wait for loader workers are none: what these take is predicted from what
    they do.
    """
    evaluations = _evaluations(result) if result.is_marked else None
    timed = [_without(evaluations, run.steps.unprofiled_ns) for run in runs.values()]
    slowest = np.array(max((steps for steps in timed if len(steps) >= _MANY), key=_mean, default=()), dtype=np.float64)
    if not len(slowest) or not result.is_marked:
        return None
    start, end = result.job_windows
    over, recorded_over = (each - np.median(each) for each in (slowest, (end - start).astype(np.float64)))
    # Those of one kind, again and again: others are noise beside them.
    again = _AS_LONG * float(np.sort(over)[-_SEVERAL])
    is_long = over > max((LONG - 1) * float(np.median(slowest)), again)
    recorded = recorded_over > max((LONG - 1) * float(np.median(end - start)), again)
    if max(is_long.mean(), recorded.mean() / 2) > _FEW or not (is_long.any() or recorded.any()):
        return None
    if recorded.any() and _wait_for_batches(result, recorded):
        return None
    short = float(slowest[~is_long].mean())
    longer = float(slowest[is_long].mean()) - short if is_long.any() else float(recorded_over[recorded].mean())
    return LongStepShare(recorded, float(is_long.mean()), longer, short + float(recorded.mean()) * longer)


def _wait_for_batches(result: AlignedJob, long: Bool) -> bool:
    """Is waiting for batches most of what these steps take longer, on any rank?"""
    over = (longer_ns(totals, long) for totals in result.totals.values())
    return any(each[TimeCategory.DATALOADER] >= each.sum() / 2 for each in over)


def longer_ns(totals: Int64, long: Bool) -> Float64:
    """By category, what ``long`` steps take longer than the others on average; ``totals`` [step, category]."""
    return np.asarray(totals[long].mean(axis=0) - totals[~long].mean(axis=0), dtype=np.float64)


def ready_step_ns(runs: Mapping[int, RunMetadata], result: AlignedJob) -> float | None:
    """What an unprofiled step would take were its batches ready, where loader workers set the pace of unprofiled steps
    and the recorded ones do not show it; else None.

    Known are how long the workers take for a batch, and that the unprofiled steps take as long. Steps whose batches are
    ready take no longer than the recorded ones without what these wait for workers, which the profiler lengthens, and
    as long as the short ones among the unprofiled.
    """
    mean_ns = unprofiled_step_ns(runs, result)
    if mean_ns is None or max(_workers_pace_ns(runs, result).values(), default=0.0) < _PACED * mean_ns:
        return None
    timed = _timed(runs, result)
    short = [[step for step in steps if step <= _READY * mean_ns] for steps in timed]
    shown_ns = min(float(totals[:, TimeCategory.DATALOADER].mean()) for totals in result.totals.values())
    ready_ns = result.step_ns - shown_ns
    if all(len(steps) >= _SEVERAL for steps in short):
        ready_ns = min(ready_ns, max(float(median(steps)) for steps in short))
    wait_ns = mean_ns - ready_ns
    return ready_ns if wait_ns >= _WAIT * mean_ns and shown_ns < _SHOWN * wait_ns else None


def paced_ranks(runs: Mapping[int, RunMetadata], result: AlignedJob, step_ns: float) -> frozenset[int]:
    """The ranks whose loader workers take as long as such a step for its batches."""
    return frozenset(rank for rank, ns in _workers_pace_ns(runs, result).items() if ns >= _PACED * step_ns)


def _workers_pace_ns(runs: Mapping[int, RunMetadata], result: AlignedJob) -> dict[int, float]:
    """Rank -> what its workers, each of which fetched a batch or more, take for the batches of a step."""
    paces = {}
    for rank, run in runs.items():
        loader = run.dataloaders[0] if run.dataloaders else None
        if loader is None or not 0 < loader.num_workers <= loader.fetched_batches or loader.fetched_ns is None:
            continue
        paces[rank] = loader.fetched_ns * result.batches_per_step[rank] / loader.num_workers
    return paces


def unprofiled_median_ns(runs: Mapping[int, RunMetadata], result: AlignedJob) -> float | None:
    """Median wall time of an unprofiled step, of the slowest rank: what profiled steps are compared with."""
    evaluations = _evaluations(result) if result.is_marked else None
    return max((median(_without(evaluations, steps)) for steps in _usable(runs, result) if steps), default=None)


def _evaluations(result: AlignedJob) -> _Evaluations | None:
    """None where every recorded step counts, or steps with an evaluation are no longer than others."""
    left_out = np.setdiff1d(result.evaluated, result.steps)
    if not len(left_out):
        return None
    longer, most_long = 0.0, 0
    for steps in (partial.steps for partial in result.partials.values()):
        took = steps.host_end_ns - steps.host_start_ns
        used = took[steps.indices_of(result.steps)]
        usual = max(float(np.median(used)), 1.0)
        multiple = float(np.median(took[steps.indices_of(left_out)])) / usual
        longer = max(longer, multiple)
        most_long = max(most_long, int((used > usual * (1 + multiple) / 2).sum()))
    if longer <= 1:
        return None
    evaluated = len(left_out)
    return _Evaluations(longer, evaluated / (evaluated + len(result.steps)), evaluated / (evaluated + most_long))


def _without(evaluations: _Evaluations | None, steps_ns: Sequence[int]) -> Sequence[int]:
    """Without steps that are nearer to one with an evaluation than to a usual one: the longest of these, as many of
    them as of the recorded ones.
    """
    if evaluations is None:
        return steps_ns
    in_order, most = sorted(steps_ns), ceil(_MORE * evaluations.share * len(steps_ns))
    # Where every second step has an evaluation, the median of all of them may be one of these.
    usual = median(in_order[: max(1, round((1 - evaluations.share) * len(in_order)))])
    long = sum(step > usual * (1 + evaluations.longer) / 2 for step in in_order)
    return in_order[: len(in_order) - min(round(long * evaluations.of_long), most)]


def _mean(steps_ns: Sequence[int]) -> float:
    """Without the longest, unless there are more that are as long: those come again and again."""
    in_order = sorted(steps_ns)
    usual = in_order[: len(in_order) - int(_ODD * len(in_order))]
    long = LONG * median(in_order)
    kept = in_order if usual[-1] > long else usual
    return sum(kept) / len(kept)
