"""Goodput from step histories: what trained, and what startup, evaluation, checkpoints, restarts and stalls took.

A step trains as long as those around it take; what it takes longer goes to what it contains. A pause on one rank is a
pause of all, who wait for it, so one rank's history tells it for the job: that of the rank that evaluates and saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from perfscope.analyzers.history.rank_history import NEIGHBOURS, OUTLIER, Float64, RankStepTimes
from perfscope.frozen import dataclass
from perfscope.recording.job import Job
from perfscope.recording.metadata import epoch_ns
from perfscope.results.history import Goodput
from perfscope.trace.trace import Bool

_WARM: Final = 1.25
"""Times the steps around it, below which a first step is a step like others."""

_MOST_WARMUP: Final = 64


@dataclass(frozen=True)
class RankGoodput:
    """One rank's wall time from its first recorded step on, µs."""

    began_ns: int
    span_us: float
    warmup_us: float
    evaluation_us: float | None
    checkpoint_us: float | None
    restart_us: float
    stall_us: float
    recording_us: float
    attempts: int
    steps: int

    @property
    def ended_ns(self) -> int:
        """When the last recorded step ended, ns since the epoch."""
        return self.began_ns + round(self.span_us * 1000)


def rank_goodput(attempts: Sequence[RankStepTimes]) -> RankGoodput:
    """Divide the time of one rank's attempts, the first one first."""
    parts = np.sum([_divided(steps) for steps in attempts], axis=0)
    ends = [int(steps.began_ns[-1]) + int(steps.step_us[-1] * 1000) for steps in attempts]
    restarts = sum(
        max(int(after.began_ns[0]) - end, 0) for end, (_, after) in zip(ends, pairwise(attempts), strict=False)
    )
    measured = all("forward" in steps.stages for steps in attempts)
    warmup, evaluation, checkpoint, stall, recording = parts.tolist()
    began = int(attempts[0].began_ns[0])
    return RankGoodput(
        began_ns=began,
        span_us=(ends[-1] - began) / 1000,
        warmup_us=warmup,
        evaluation_us=evaluation if measured else None,
        checkpoint_us=checkpoint if measured else None,
        restart_us=restarts / 1000,
        stall_us=stall,
        recording_us=recording,
        attempts=len(attempts),
        steps=sum(len(steps.number) for steps in attempts),
    )


def stood_still_us(job: Job, ranks: Mapping[int, RankGoodput]) -> float | None:
    """From the end of the last step to that of a command that failed, where no rank ended itself; else None."""
    launch = job.launch
    ended = epoch_ns(launch.ended_at) if launch is not None and launch.exit_code else None
    if ended is None or not ranks or any(run.ended_at for run in job.runs.values()):
        return None
    return max((ended - max(row.ended_ns for row in ranks.values())) / 1000, 0.0)


def job_goodput(job: Job, ranks: Mapping[int, RankGoodput], still_us: float) -> Goodput | None:
    """The goodput of the job, which stalls for ``still_us`` before it is ended (``stood_still_us``); None without a
    history.
    """
    if not ranks:
        return None
    rank = max(sorted(ranks), key=lambda each: (ranks[each].evaluation_us or 0) + (ranks[each].checkpoint_us or 0))
    row = ranks[rank]
    started = epoch_ns(job.launch.started_at if job.launch else "")
    if started is None and rank in job.runs:
        started = epoch_ns(job.runs[rank].started_at)
    startup = max((row.began_ns - started) / 1000, 0.0) if started is not None else None
    wall, stall = row.span_us + (startup or 0.0) + still_us, row.stall_us + still_us
    pauses = (row.evaluation_us or 0.0) + (row.checkpoint_us or 0.0) + row.restart_us + stall
    training = max(wall - (startup or 0.0) - row.warmup_us - pauses - row.recording_us, 0.0)
    return Goodput(
        rank=rank,
        wall_us=wall,
        training_us=training,
        training_share=training / wall if wall > 0 else 0.0,
        startup_us=startup,
        warmup_us=row.warmup_us,
        evaluation_us=row.evaluation_us,
        checkpoint_us=row.checkpoint_us,
        restart_us=row.restart_us,
        stall_us=stall,
        recording_us=row.recording_us,
        restarts=row.attempts - 1,
        steps=row.steps,
    )


def _divided(steps: RankStepTimes) -> Float64:
    """Of one attempt: warm-up, evaluation, checkpoints, stalls and recording, µs."""
    evaluation, checkpoint = (_stage(steps, name) for name in ("evaluation", "checkpoint"))
    pauses = evaluation + checkpoint
    plain = ~steps.disturbed & (pauses == 0)
    around = _around(steps.step_us, plain)
    excess = np.maximum(steps.step_us - around, 0.0)
    first = _warm_up(steps.step_us, around, plain)
    # What surrounds an evaluation's forwards (its loader, its metrics) belongs to it.
    paused = np.where(pauses > 0, np.minimum(np.maximum(excess, pauses), steps.step_us), 0.0)
    share = evaluation / np.maximum(pauses, 1)
    later = np.arange(len(plain)) >= first
    stalls = excess[plain & later & (steps.step_us >= OUTLIER * around)]
    ended = steps.began_ns[:-1] + (steps.step_us[:-1] * 1000).astype(np.int64)
    following = np.diff(steps.number) == 1
    between = np.maximum(steps.began_ns[1:] - ended, 0)[following] / 1000
    disturbed = excess[steps.disturbed & (pauses == 0)]
    return np.array([
        excess[plain & ~later].sum(),
        (paused * share).sum(),
        (paused * (1 - share)).sum(),
        stalls.sum(),
        disturbed.sum() + between.sum(),
    ])  # fmt: skip


def _stage(steps: RankStepTimes, name: str) -> Float64:
    if name not in steps.stages:
        return np.zeros(len(steps.number))
    column: Float64 = steps.stages_us[:, steps.stages.index(name)]
    return column


def _around(step_us: Float64, plain: Bool) -> Float64:
    """For each step the median of the plain ones among its neighbours; of all plain ones where it has none."""
    whole = float(np.median(step_us[plain] if plain.any() else step_us))
    edges = np.linspace(0, len(step_us), max(1, len(step_us) // NEIGHBOURS) + 1).astype(np.int64)
    medians = [
        float(np.median(step_us[begin:end][plain[begin:end]])) if plain[begin:end].any() else whole
        for begin, end in pairwise(edges)
    ]
    around: Float64 = np.repeat(medians, np.diff(edges))
    return around


def _warm_up(step_us: Float64, around: Float64, plain: Bool) -> int:
    """Steps at the beginning that are longer than others, up to the first that is not."""
    like_others = np.flatnonzero(plain & (step_us < _WARM * around))
    return min(int(like_others[0]), _MOST_WARMUP) if len(like_others) else 0
