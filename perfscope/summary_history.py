"""The summary's history: how long the steps of the whole run took, captured or not.

A key beyond the contract of ``perfscope.summary`` that follows its rules: µs, fractions 0..1, None where the data
cannot support a number. All of it is the host's clock on the training thread, boundary to boundary of steps: with a
device, stages are the time to launch their work, or to wait for it, not the work's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

OTHER = "other"
"""What no measured stage covers: Python between stages, evaluation, checkpoints, waiting outside of them."""


@dataclass(frozen=True, kw_only=True)
class RankHistory:
    """One rank's steps, those during which the collector itself was at work left out of every statistic."""

    rank: int
    host: str
    attempt: int
    """Elastic restarts before these steps; those of earlier attempts are only counted."""
    earlier_steps: int
    """Steps kept of earlier attempts."""
    first_step: int
    last_step: int
    steps: int
    """Steps that the statistics are of."""
    disturbed_steps: int
    lost_steps: int
    """Steps between the first and the last that the file does not hold."""
    mean_us: float
    median_us: float
    p95_us: float
    p99_us: float
    max_us: float
    stages_us: dict[str, float]
    """Mean per step of each stage that was measured, and of ``other``; they add up to ``mean_us``."""
    outlier_steps: int
    """Steps of at least 1.5 times the median of those around them."""
    trend: float | None
    """Median of the last tenth of the steps over that of the first, less 1; None below 100 steps."""

    def self_check(self) -> None:
        """Raise ValueError where the stages do not add up to the step (each is rounded to a µs)."""
        total = math.fsum(self.stages_us.values())
        if not math.isclose(total, self.mean_us, rel_tol=1e-9, abs_tol=1e-6):
            raise ValueError(f"rank {self.rank}: stages add up to {total} us, the mean step is {self.mean_us} us")


@dataclass(frozen=True, kw_only=True)
class HistoryBin:
    """Consecutive steps of the job; for a picture of the whole run."""

    first_step: int
    last_step: int
    median_us: float
    """Of the rank with the longest median."""
    max_us: float
    """Longest step of any rank."""


@dataclass(frozen=True, kw_only=True)
class OutlierStep:
    """A step that took far longer than those around it."""

    step: int
    us: float
    """Of the rank on which it was longest."""
    ratio: float
    """To the median of the steps around it."""
    ranks: tuple[int, ...]
    """Ranks on which it was an outlier."""
    rank: int
    """Where most of the excess lies outside stages in which ranks wait for one another; else where it was longest."""
    stage: str
    """The stage that holds most of that rank's excess."""


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank that spends more of its steps in a stage than its peers, in one where ranks do not wait for others."""

    rank: int
    host: str
    stage: str
    excess_us: float
    """Mean per step, over the median of the other ranks; what of it the job would gain is not known."""
    share_of_run: float
    """Share of the run's stretches in which that was so."""


@dataclass(frozen=True, kw_only=True)
class History:
    """Every step of the run."""

    ranks: tuple[RankHistory, ...]
    bins: tuple[HistoryBin, ...]
    outliers: tuple[OutlierStep, ...]
    """The longest first, at most 50."""
    slow_ranks: tuple[SlowRank, ...]
    """The largest excess first."""
    missing_ranks: tuple[int, ...] = field(default=())
    """Ranks of the world without a history."""
