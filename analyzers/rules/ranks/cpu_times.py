"""A rank whose training thread takes more CPU time per step than the others', without the profiler, on CPUs.

A thread that waits for other ranks, or sleeps, takes no CPU time: what one takes more the others wait for, at most. The
few recorded steps may not show it, where other programs had one core here and another there. Fires where these name no
straggler. Stages of a pipeline have different work, and are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, pvariance
from typing import Final

from perfscope.analyzers.replay.stragglers.profiling_effects import usual_mean
from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Action, Confidence, Evidence, Finding

RULE: Final = "uneven-cpu-time"
SHARE: Final = 0.10
"""Least share of an unprofiled step by which a rank's thread runs longer than the others'."""
_FEWEST: Final = 10
"""Steps of each rank from which their means tell."""
_SURE: Final = 4.0
"""Standard errors by which the means differ."""
_LONG: Final = 1.5
"""Times the median, as which longer steps count there."""
_STRAGGLER: Final = 0.05
"""Share of the step from which a straggler is told by the recorded steps."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: nothing of it is recorded, all run as long, or the recorded steps name somebody."""
    times = {rank: run.steps.unprofiled_thread_ns for rank, run in job.runs.items()}
    known = len(times) > 1 and set(times) == set(job.ranks) and min(map(len, times.values())) >= _FEWEST
    if job.on_devices or not known or job.summary.pipeline is not None or job.info.unprofiled_step_us is None:
        return None
    if any(row.lost_us >= _STRAGGLER * job.step_time_us for row in job.summary.stragglers):
        return None
    rank = max(times, key=lambda rank: usual_mean(times[rank]))
    own_ns = usual_mean(times[rank])
    others_ns = median(fmean(_usual(each)) for other, each in times.items() if other != rank)
    longer_us = (own_ns - others_ns) / 1e3
    share = longer_us / job.info.unprofiled_step_us
    others = [each for other, each in times.items() if other != rank]
    if share < SHARE or not all(_runs_longer(times[rank], each) for each in others):
        return None
    return job.finding(
        RULE,
        f"Rank {rank}'s training thread takes {own_ns / others_ns:.2g} times the others' CPU time per step "
        f"without the profiler: the others may wait for it {min(share, 1.0):.0%} of the step",
        min(share, _MOST) * job.step_time_us,
        evidence=(
            Evidence("its CPU time per step without the profiler", own_ns / 1e3, "us", (rank,)),
            Evidence("the others' (median)", others_ns / 1e3, "us", tuple(each for each in job.ranks if each != rank)),
            Evidence("unprofiled step time", job.info.unprofiled_step_us, "us", job.ranks),
        ),
        action=Action(setting=f"rank {rank}", old=None, new=None, how=_HOW.format(rank=rank)),
        confidence=job.confidence(Confidence.MEDIUM),
    )


def _runs_longer(mine: Sequence[int], others: Sequence[int]) -> bool:
    """Is the difference of two means no chance, but for steps that are far longer than usual?"""
    own, their = _usual(mine), _usual(others)
    error = math.sqrt(sum(pvariance(steps, fmean(steps)) / len(steps) for steps in (own, their)))
    return fmean(own) - fmean(their) >= _SURE * error


def _usual(steps_ns: Sequence[int]) -> list[float]:
    most = _LONG * median(steps_ns)
    return [min(step, most) for step in steps_ns]


_MOST: Final = 0.9
"""Share of the step that may be lost, at most."""
_HOW: Final = (
    "Look at what rank {rank} computes, or runs in Python, and the others do not: more or longer samples, metrics, "
    "logging, generation, or a core that is slower. The recorded steps do not show it plainly, as other programs used "
    "the cores then: record again on a quiet machine, or more steps (perfscope run --active 50)."
)
