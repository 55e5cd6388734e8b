"""The stragglers as the summary shows them: who, since when, how surely."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.replay.engine import Played
from perfscope.analyzers.replay.programs import Recorded
from perfscope.analyzers.straggling.excess import NOISE
from perfscope.analyzers.straggling.stragglers import Lateness, find_lateness
from perfscope.findings import Confidence
from perfscope.summary import StragglerRow

STEADY: Final = 0.6
"""Share of the steps that a culprit must have held up to be called steady."""

FEW_STEPS: Final = 5
"""Below this many steps nothing is more than a suspicion."""


def straggler_rows(
    result: Comparison, recorded: Recorded, played: Played, hosts: Mapping[int, str], *, complete: bool
) -> tuple[StragglerRow, ...]:
    """Everyone who cost the job more than noise, worst first.

    ``played`` is the unchanged replay; ``complete``: no rank is missing.
    """
    found = find_lateness(result, recorded, played, hosts)
    highest = np.max([late.per_step_ns for late in found], axis=0) if found else np.zeros(0, dtype=np.int64)
    return tuple(_row(result, late, highest, hosts, complete=complete) for late in found)


def _row(
    result: Comparison, late: Lateness, highest: NDArray[np.int64], hosts: Mapping[int, str], *, complete: bool
) -> StragglerRow:
    costs = late.per_step_ns >= NOISE * result.step_ns
    share = float(((late.per_step_ns == highest) & costs).mean())
    return StragglerRow(
        rank=late.rank,
        cause=late.cause,
        lost_us=late.lost_ns / 1e3,
        confidence=_confidence(len(result.steps), share, complete=complete).value,
        share_of_steps=share,
        host=hosts.get(late.rank, ""),
        scope=late.scope,
        ranks=late.ranks,
        pattern=_pattern(late, float(costs.mean())),
        steps=tuple(int(step) for step in result.steps[costs]),
    )


def _pattern(late: Lateness, share: float) -> str:
    if late.scope == "job":
        return "rotating"
    return "steady" if share >= STEADY else "intermittent"


def _confidence(steps: int, share: float, *, complete: bool) -> Confidence:
    if steps < FEW_STEPS:
        return Confidence.LOW
    return Confidence.HIGH if share >= 0.8 and complete else Confidence.MEDIUM
