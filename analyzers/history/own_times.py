"""What each rank did itself in every step, without its waiting for others: what ranks are compared by.

Ranks that train together wait for one another, so their steps are all as long. The slow one is the rank that waits
least, and the stage that it is slow in is the one in which its *own* time (the stage's less waiting) is longer than
that of its peers. Each is a difference of two readings of one clock, so clocks of different hosts are never compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from perfscope.analyzers.history.goodput import RankGoodput, rank_goodput
from perfscope.analyzers.history.rank_history import (
    RankFile,
    RankPartialHistory,
    RankStepTimes,
    read_attempts,
    reduce_steps,
)
from perfscope.frozen import dataclass
from perfscope.recording.history import CORE, STAGES
from perfscope.results.history import OTHER
from perfscope.trace.trace import Float32, Float64, Int64

COLUMNS: Final = (*STAGES, OTHER, CORE)
"""What own time is of, in the order of its columns: the stages, and waiting for a core."""

WINDOW: Final = 64
"""Consecutive steps that are compared or left out together."""

MOST_RANK_STEPS: Final = 1 << 22
"""Steps of all ranks that are compared; of more, every so many windows."""


@dataclass(frozen=True, eq=False)
class OwnTimes:
    """One rank's steps, ascending by number, those left out in which the collector was at work."""

    number: Int64
    step_us: Float32
    own_us: Float32
    """A row for each step, a column for each of ``COLUMNS``; that of waiting for a core is 0."""
    wait_us: Float32
    """Waiting for other ranks in each step."""
    core_us: Float32
    """Waiting for a core, which no stage of ``own_us`` includes."""


@dataclass(frozen=True, eq=False)
class RankParts:
    """What is made of the file of one rank."""

    history: RankPartialHistory
    own: OwnTimes | None
    """None where waiting was not measured."""
    goodput: RankGoodput


@dataclass(frozen=True, eq=False)
class JobOwnTimes:
    """The steps that all ranks have."""

    ranks: tuple[int, ...]
    number: Int64
    step_us: Float32
    """A row for each step, a column for each rank."""
    own_us: Float32
    """Steps x ranks x ``COLUMNS``."""
    wait_us: Float32
    """Steps x ranks."""
    core_us: Float32
    """Steps x ranks."""

    def with_core(self) -> JobOwnTimes:
        """Waiting for a core counted as each rank's own time."""
        own = self.own_us.copy()
        own[:, :, COLUMNS.index(CORE)] = self.core_us
        return replace(self, own_us=own)


def windows_left_out(steps: int) -> int:
    """Of so many steps of all ranks together, every how many windows are compared."""
    return max(1, -(-steps // MOST_RANK_STEPS))


def rank_parts(file: RankFile, width: int, every: int) -> RankParts:
    """Read a file and reduce it, with bins of ``width`` and every so many windows of own times.

    Raises TraceError where the file has no step.
    """
    attempts = read_attempts(file.path)
    return RankParts(reduce_steps(attempts[-1], file, width), own_times(attempts[-1], every), rank_goodput(attempts))


def own_times(steps: RankStepTimes, every: int = 1) -> OwnTimes | None:
    """One rank's own times, of every so many windows; None where waiting was not measured, or no step is left."""
    if steps.waits_us is None:
        return None
    used = ~steps.disturbed & ((steps.number // WINDOW) % every == 0)
    if not used.any():
        return None
    own = np.zeros((int(used.sum()), len(COLUMNS)), np.float32)
    places = [COLUMNS.index(name) for name in (*steps.stages, OTHER)]
    own[:, places], core = without_waits(
        steps.step_us[used], steps.stages_us[used], steps.waits_us[used], steps.core_us[used]
    )
    return OwnTimes(
        number=steps.number[used],
        step_us=steps.step_us[used].astype(np.float32),
        own_us=own,
        wait_us=steps.waits_us[used].sum(axis=1).astype(np.float32),
        core_us=core.astype(np.float32),
    )


def without_waits(step_us: Float64, stages_us: Float64, waits_us: Float64, core_us: Float64) -> tuple[Float64, Float64]:
    """What a rank did itself in each stage of each step, and what of its own time it waited for a core.

    ``core_us`` has a column for each stage, and one for what may lie anywhere in the step.
    """
    not_waiting = np.maximum(stages_us - waits_us, 0)
    own = np.maximum(not_waiting - core_us[:, :-1], 0)
    # Of what may lie anywhere, as much in own time as that is of the step. More of it than usual is where the step is
    # longer than usual.
    anywhere = core_us[:, -1]
    usual = np.minimum(anywhere, np.median(anywhere))
    own *= 1 - np.minimum(usual / np.maximum(step_us, 1), 1)[:, None]
    longer = np.maximum(own - np.median(own, axis=0), 0)
    own -= longer * np.minimum((anywhere - usual) / np.maximum(longer.sum(axis=1), 1), 1)[:, None]
    return own, (not_waiting - own).sum(axis=1)


def common_steps(ranks: Mapping[int, OwnTimes]) -> JobOwnTimes | None:
    """The steps that all of these ranks have; None where there is none."""
    if not ranks:
        return None
    number = _intersection(each.number for each in ranks.values())
    if not len(number):
        return None
    rows = {rank: np.searchsorted(each.number, number) for rank, each in ranks.items()}
    return JobOwnTimes(
        ranks=tuple(ranks),
        number=number,
        step_us=np.stack([each.step_us[rows[rank]] for rank, each in ranks.items()], axis=1),
        own_us=np.stack([each.own_us[rows[rank]] for rank, each in ranks.items()], axis=1),
        wait_us=np.stack([each.wait_us[rows[rank]] for rank, each in ranks.items()], axis=1),
        core_us=np.stack([each.core_us[rows[rank]] for rank, each in ranks.items()], axis=1),
    )


def _intersection(numbers: Iterable[Int64]) -> Int64:
    common: Int64 | None = None
    for each in numbers:
        common = each if common is None else np.intersect1d(common, each, assume_unique=True)
    return common if common is not None else np.zeros(0, np.int64)
