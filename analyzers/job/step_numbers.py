"""Numbers of steps that ranks count from where their recordings begin: the same step gets the same number on all.

Profilers that are started in each process, or after some seconds, need not begin in the same step. Where nothing
numbers the steps, those that run at the same time are taken for the same::

    rank 0   | step 0 | step 1 | step 2 | step 3 |
    rank 1            | step 0 | step 1 | step 2 |      is | step 1 | step 2 | step 3 |

Clocks of hosts differ by milliseconds: less than most steps take. Where they are further apart, nothing tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from perfscope.analyzers.rank.partial import RankPartial
from perfscope.analyzers.rank.steps import BY_OPTIMIZER, BY_REPETITION, Steps

_COUNTED: Final = (BY_OPTIMIZER, BY_REPETITION)
_NEAR: Final = 0.3
"""Share of a step by which the same step begins later on one rank than on another, at most: with half of one it would
not be known which is the same."""
_MOST: Final = 0.5
"""Share of the steps of the rank that has fewer which both have, at least."""


def numbered_alike(partials: Mapping[int, RankPartial]) -> dict[int, RankPartial]:
    """The same, with numbers of counted steps that agree with those of the lowest rank that counts."""
    counted = {
        rank: partial.steps
        for rank, partial in sorted(partials.items())
        if partial.steps.marked and partial.steps.source in _COUNTED
    }
    if len(counted) < 2:
        return dict(partials)
    first = next(iter(counted.values()))
    later = {rank: _later(first, steps) for rank, steps in counted.items()}
    # A rank whose recording began before the first one's would have negative numbers.
    more = -min(0, *(int(steps.number[0]) + later[rank] for rank, steps in counted.items()))
    return dict(partials) | {
        rank: replace(partials[rank], steps=_from(steps, later[rank] + more)) for rank, steps in counted.items()
    }


def _from(steps: Steps, more: int) -> Steps:
    return replace(steps, number=steps.number + more, left_out=tuple(number + more for number in steps.left_out))


def _later(first: Steps, steps: Steps) -> int:
    """What to add to the numbers of ``steps`` so that they agree with those of ``first``; 0 where nothing tells."""
    if len(first) < 2 or len(steps) < 2:
        return 0
    period_ns = float(np.median(np.diff(first.host_start_ns)))
    begins = dict(zip(first.number.tolist(), first.host_start_ns.tolist(), strict=True))
    mine = list(zip(steps.number.tolist(), steps.host_start_ns.tolist(), strict=True))
    apart: dict[int, float] = {}
    for more in range(int(first.number[0] - steps.number[-1]), int(first.number[-1] - steps.number[0]) + 1):
        both = [abs(begins[number + more] - begin) for number, begin in mine if number + more in begins]
        if len(both) >= _MOST * min(len(first), len(steps)):
            apart[more] = float(np.median(both))
    nearest = min(apart, key=lambda more: apart[more], default=0)
    return nearest if apart.get(nearest, np.inf) <= _NEAR * period_ns else 0
