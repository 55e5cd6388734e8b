"""The stragglers as the summary shows them: which ranks, in which steps, how surely."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.replay.engine import ReplayResult
from perfscope.analyzers.replay.schedules import RecordedSchedules
from perfscope.analyzers.replay.stragglers.own_time import NOISE
from perfscope.analyzers.replay.stragglers.search import find_stragglers
from perfscope.analyzers.replay.stragglers.straggler import Straggler
from perfscope.results.findings import Confidence
from perfscope.results.rows import FEW_STEPS, StragglerRow
from perfscope.trace.trace import Bool, Int64

STEADY: Final = 0.6
"""A straggler that costs time in this share of the steps or more is steady."""
_LITTLE: Final = 0.1
"""Part of what a step costs, in the mean of all that it costs, below which one is none of those that cost time."""
_LONGER: Final = 2.0
"""How many times as much some steps cost that stand out, at least."""
_FEWEST: Final = 2
"""How many of these there are, at least: what comes once may be by accident."""


def straggler_rows(
    result: AlignedJob,
    recorded: RecordedSchedules,
    replayed: ReplayResult,
    hosts: Mapping[int, str],
    core_ns: Mapping[int, Int64] | None = None,
    *,
    complete: bool,
) -> tuple[StragglerRow, ...]:
    """All stragglers that cost the job more than noise, the costliest first.

    ``replayed`` is the unchanged replay; ``core_ns`` as in ``find_stragglers``; ``complete``: no rank is missing.
    """
    stragglers = find_stragglers(result, recorded, replayed, hosts, core_ns)
    if not stragglers:
        return ()
    highest = np.max([straggler.per_step_ns for straggler in stragglers], axis=0)
    return tuple(_row(result, straggler, highest, hosts, complete=complete) for straggler in stragglers)


def _row(
    result: AlignedJob, straggler: Straggler, highest: NDArray[np.int64], hosts: Mapping[int, str], *, complete: bool
) -> StragglerRow:
    costs = _costs(straggler.per_step_ns, NOISE * result.step_ns)
    share = float(((straggler.per_step_ns == highest) & costs).mean())
    longest = _longest(straggler.per_step_ns) if straggler.scope != "job" else np.zeros_like(costs)
    return StragglerRow(
        rank=straggler.rank,
        cause=straggler.cause,
        lost_us=straggler.lost_ns / 1e3,
        confidence=_confidence(len(result.steps), share, straggler, complete=complete).value,
        share_of_steps=share,
        host=_host_of(straggler, hosts),
        scope=straggler.scope,
        ranks=straggler.ranks,
        pattern=_pattern(straggler, float(costs.mean())),
        steps=tuple(int(step) for step in result.steps[costs]),
        causes=straggler.causes,
        alone_us=tuple(ns / 1e3 for ns in straggler.alone_ns),
        adds_us=tuple(ns / 1e3 for ns in straggler.adds_ns),
        replayed=straggler.replayed,
        within_steps=straggler.within_steps,
        longest_steps=tuple(int(step) for step in result.steps[longest]),
        longest_us=float(straggler.per_step_ns[longest].mean()) / 1e3 if longest.any() else 0.0,
    )


def _host_of(straggler: Straggler, hosts: Mapping[int, str]) -> str:
    """That of the slowest rank; of a link, the one that holds both its ends."""
    ends = {hosts.get(rank, "") for rank in straggler.ranks} if straggler.scope == "link" else set()
    return "" if len(ends) > 1 else hosts.get(straggler.rank, "")


def _costs(per_step_ns: Int64, noise_ns: float) -> Bool:
    """The steps that cost more than noise, and not next to nothing beside those that cost the most: of 200 ms in two
    steps and 2 ms in all others it is these two.
    """
    cost = np.maximum(per_step_ns, 0).astype(np.float64)
    typical_ns = float((cost**2).sum() / max(cost.sum(), 1.0))
    return np.asarray(per_step_ns >= max(noise_ns, _LITTLE * typical_ns), dtype=np.bool_)


def _longest(per_step_ns: Int64) -> Bool:
    """The steps, up to half of all, that cost far more than the others: the gap between the two is wider than either of
    them is spread, as where a rank that is slow in all steps also pauses in every third. None where there are fewer
    than two, or no such gap.
    """
    cost = np.sort(np.maximum(per_step_ns, 0))
    none: Bool = np.zeros(len(cost), dtype=np.bool_)
    if len(cost) < 2 * _FEWEST:
        return none
    gaps = np.diff(cost)
    first = int(gaps.argmax()) + 1
    few, most = cost[first:], cost[:first]
    spread = max(np.ptp(few), np.ptp(most))
    if not _FEWEST <= len(few) <= len(most) or gaps[first - 1] <= spread or few.mean() < _LONGER * most.mean():
        return none
    return np.asarray(per_step_ns >= few[0], dtype=np.bool_)


def _pattern(straggler: Straggler, share: float) -> str:
    if straggler.scope == "job":
        return "rotating"
    return "steady" if share >= STEADY else "intermittent"


def _confidence(steps: int, share: float, straggler: Straggler, *, complete: bool) -> Confidence:
    if steps < FEW_STEPS or not straggler.replayed:
        return Confidence.LOW
    return Confidence.HIGH if share >= 0.8 and complete else Confidence.MEDIUM
