"""Whether the steps of a run take another time from some step on than before: not slowly more, but at once.

The step is the one that splits the bins of the run best: the sum of their distances from the median of their side is
the least. It counts where the medians are far apart beside these distances, and where the bins right before the step
and right behind it are apart by most of that: a slow drift splits well, but has no such edge. Source: least absolute
deviations with one change point, as in "ruptures" (Truong et al., 2020, cost ``l1``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.history.rank_history import Float64
from perfscope.results.history import HistoryBin, LongSteps, StepChange

FEWEST_STEPS: Final = 10
"""Steps, at least, at either side: fewer are a start, or an end."""
_FEWEST_BINS: Final = 5
"""Bins, at least, at either side, and those by which the edge is measured."""
_CHANGED: Final = 0.1
"""Relative difference from which it is another step time."""
_APART: Final = 5.0
"""Times the mean distance of bins from the median of their side that the medians are apart, at least; a steady drift
has 4."""
_PAUSE: Final = 1.5
"""What pauses take, at least, over the difference of both sides."""
_EDGE: Final = 0.6
"""Part of the difference that lies between the bins right before the step and those right after it, at least."""


def step_change(bins: Sequence[HistoryBin]) -> StepChange | None:
    """The one change of a run's steps; None where there is none that is plain."""
    times = np.array([each.median_us for each in bins], dtype=np.float64)
    places = [
        place
        for place in range(_FEWEST_BINS, len(bins) - _FEWEST_BINS + 1)
        if bins[place].first_step - bins[0].first_step >= FEWEST_STEPS
        and bins[-1].last_step + 1 - bins[place].first_step >= FEWEST_STEPS
    ]
    if not places:
        return None
    place = min(places, key=lambda each: _distance(times[:each]) + _distance(times[each:]))
    before, after = float(np.median(times[:place])), float(np.median(times[place:]))
    within = (_distance(times[:place]) + _distance(times[place:])) / len(times)
    edge = float(np.median(times[place : place + _FEWEST_BINS]) - np.median(times[place - _FEWEST_BINS : place]))
    apart = after - before
    if abs(apart) < max(_CHANGED * before, _APART * within) or edge / apart < _EDGE:
        return None
    return StepChange(
        first_step=bins[place].first_step, about=bins[place].last_step > bins[place].first_step, before_us=before,
        after_us=after, share_after=float(times[place:].sum() / times.sum()),
    )  # fmt: skip


def is_side(change: StepChange, long: LongSteps) -> bool:
    """Are these no pauses, but steps at the slower side, near enough to the others to be compared with those?"""
    apart_us = abs(change.after_us - change.before_us)
    slower = ((step >= change.first_step) is change.slower for step in long.steps)
    return all(slower) and long.longer_us < _PAUSE * apart_us


def _distance(times: Float64) -> float:
    return float(np.abs(times - np.median(times)).sum())
