"""The history: how long the steps of the whole run took, captured or not.

All times are by the host's clock on the training thread, from one step boundary to the next: with a device, a stage's
time is that of launching its kernels or waiting for them, not that of the kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from perfscope.results.fields import Ratio, Share, Unit, Us

OTHER = "other"
"""Time that no measured stage covers: Python between stages, evaluation, checkpoints, waiting outside of them."""


@dataclass(frozen=True, kw_only=True)
class RankHistory:
    """One rank's steps. No statistic includes the steps during which the collector itself was at work."""

    rank: int
    host: str
    attempt: Annotated[int, "Elastic restarts before these steps; steps of earlier attempts are only counted."]
    earlier_steps: Annotated[int, "Recorded steps of earlier attempts."]
    first_step: int
    last_step: int
    steps: Annotated[int, "Steps that the statistics are of."]
    disturbed_steps: Annotated[int, "Steps in which the collector itself was at work; left out of the statistics."]
    lost_steps: Annotated[int, "Steps between the first and the last that the file does not hold."]
    mean_us: Us
    median_us: Us
    p95_us: Us
    p99_us: Us
    max_us: Us
    stages_us: Annotated[
        dict[str, Us], "Mean per step of each stage that was measured, and of ``other``; they add up to ``mean_us``."
    ]
    outlier_steps: Annotated[int, "Steps of at least 1.5 times the median of those around them."]
    trend: Annotated[
        float | None,
        Unit("0.25 is 25 %"),
        "Median of the last tenth of the steps over that of the first, less 1; None below 100 steps.",
    ]

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
    median_us: Annotated[Us, "Of the rank with the longest median."]
    max_us: Annotated[Us, "Longest step of any rank."]


@dataclass(frozen=True, kw_only=True)
class OutlierStep:
    """A step that took far longer than those around it."""

    step: int
    us: Annotated[Us, "Of the rank on which it was longest."]
    ratio: Annotated[Ratio, "To the median of the steps around it."]
    ranks: Annotated[tuple[int, ...], "Ranks on which it was an outlier."]
    rank: Annotated[
        int,
        "Where most of the excess lies outside stages in which ranks wait for one another; else where it was longest.",
    ]
    stage: Annotated[str, "The stage that holds most of that rank's excess."]


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank that spends more of its steps in a stage than its peers, in one where ranks do not wait for others."""

    rank: int
    host: str
    stage: Annotated[str, "The stage of the step, such as ``forward`` or ``dataloader``."]
    excess_us: Annotated[
        Us, "Mean per step, over the median of the other ranks; how much of it the job would gain is not known."
    ]
    share_of_run: Annotated[Share, "Share of the run's segments in which that was so."]


@dataclass(frozen=True, kw_only=True)
class History:
    """Every step of the run."""

    ranks: tuple[RankHistory, ...]
    bins: tuple[HistoryBin, ...]
    outliers: Annotated[tuple[OutlierStep, ...], "The longest first, at most 50."]
    slow_ranks: Annotated[tuple[SlowRank, ...], "The largest excess first."]
    missing_ranks: Annotated[tuple[int, ...], "Ranks of the world without a history."] = field(default=())
