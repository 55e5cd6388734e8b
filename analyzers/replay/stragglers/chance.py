"""Is a rank slow, or did what comes to every rank now and then come to it more often in the recorded steps?

Small losses only are looked at so: what costs the job a twentieth of its time is told, whatever it was, unless steps
vary by as much: each of two ranks that vary costs the other something. Below that a rank is slow where it is above its
peers by so much more than its noise that the mean of so many steps is no chance, or where it is far above them in
several steps, and in more than others are. In a few steps once is often enough, and less of a difference: whether it
comes again they do not show. Where some of a few steps take far longer on every rank (a loop that collects samples
every so many steps), what varies in these is more than other steps take: what a rank costs in them is looked at, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np

from perfscope.analyzers.replay.stragglers.own_time import LARGE, NOISE, over_others
from perfscope.trace.medians import deviation
from perfscope.trace.trace import Float64, Int64

MANY_STEPS: Final = 20
"""Steps in which what a rank does now and then comes more than once, as in step histories."""

_FEW_STEPS: Final = 4
"""Steps that show how much they vary."""

_SURE: Final = 4.0
_LIKELY: Final = 2.5
"""Standard errors by which a mean is no chance: of many steps, and of a few."""

_FAR: Final = 4.0
_FAR_OF_FEW: Final = 6.0
"""Standard deviations of usual steps from which one is far above them: of many steps, and of a few."""

_QUICK: Final = 0.25
_SIGMAS_TO_QUICK: Final = 0.6745
"""Standard deviations of a normal distribution from its median to that quantile."""

_AGAIN: Final = 4
_OFTEN: Final = 1 / 6
"""How many of many steps, and which share of them, must be."""

_OFTENER: Final = 2.0
"""And more than so many times as many as of another rank."""

_LONG: Final = 2.0
"""Times the usual from which a step is long that takes the quickest rank as much."""

_CHANCE: Final = 0.01
"""How likely it may be that only some ranks of all are slow in so many steps where each might be."""


def are_few(ranks: int, of_all: int, steps: int) -> bool:
    """Is it no chance that no more than ``ranks`` different ones of all are slow, each time one, in so many steps?

    Example: of eight ranks two are, in eight steps. Were it any of them each time, these would be only two in 28
    · (2/8)^8 of all cases, 1 in 2341.
    """
    return ranks < of_all and math.comb(of_all, ranks) * (ranks / of_all) ** steps < _CHANCE


def all_there_by_chance(ranks: int, of_all: int, times: int) -> bool:
    """May what comes to any rank have come to so many of all ranks only, so many times? They are one of several hosts.

    Example: seven times to the ranks of one of two hosts, 2 · (1/2)^7 = 1/64 of all cases.
    """
    return of_all / ranks * (ranks / of_all) ** times >= _CHANCE


def least_told_ns(own_ns: Int64, step_ns: float) -> float:
    """The cost from which chance is not asked about, ns. ``own_ns``: own time of the peers [rank, used step]."""
    if own_ns.shape[1] < MANY_STEPS:
        return LARGE * step_ns
    excess = over_others(own_ns).astype(np.float64)
    return max(LARGE * step_ns, float(np.median([deviation(each) for each in excess])))


def rests_on_one_step(saved_ns: Int64, noise_ns: float) -> bool:
    """Do many steps save no more than noise without the one that saves the most? ``saved_ns``: of each used step."""
    return len(saved_ns) >= MANY_STEPS and float(saved_ns.sum() - saved_ns.max()) < noise_ns * (len(saved_ns) - 1)


def rests_on_long_steps(saved_ns: Int64, own_ns: Int64, step_ns: float) -> bool:
    """Do a few steps save little without those that take far longer on every rank? ``saved_ns``: of each used step;
    ``own_ns``: own time of the peers [rank, used step].
    """
    least = own_ns.min(axis=0)
    is_long = least >= _LONG * max(float(np.median(least)), 1.0)
    if len(saved_ns) >= MANY_STEPS or not is_long.any():
        return False
    return float(saved_ns[~is_long].sum()) < LARGE * step_ns * len(saved_ns)


def by_same_share(line: int, own_ns: Int64) -> bool:
    """Is one of some peers slower by much the same share of each step, long or not, so that it is no chance?"""
    usual = np.maximum(np.median(own_ns, axis=0), 1.0)
    share = over_others(own_ns)[line] / usual
    error = float(share.std(ddof=1)) / math.sqrt(len(share))
    return bool(share.mean() >= max(_SURE * error, LARGE))


def by_chance(line: int, views: Iterable[Int64], step_ns: float) -> bool:
    """Is what one of some peers (``line``) takes longer than the others no more than they all do now and then?

    ``views``: own time of the peers [rank, used step], ns: all of it, and parts of it, in which a delay may be plain
    that the noise of the rest hides.
    """
    return not any(_is_plain(line, over_others(view).astype(np.float64), step_ns) for view in views)


def _is_plain(line: int, excess: Float64, step_ns: float) -> bool:
    """Is one of the peers (lines) slower than the others, steadily or in more steps (columns)?"""
    mine, steps = excess[line], excess.shape[1]
    if steps < _FEW_STEPS:
        return True
    error = float(mine.std(ddof=1)) / math.sqrt(steps)
    if mine.mean() >= max((_SURE if steps >= MANY_STEPS else _LIKELY) * error, NOISE * step_ns):
        return True
    if steps < MANY_STEPS:
        *usual, highest = np.sort(mine)
        return bool(highest >= max(np.mean(usual) + _FAR_OF_FEW * np.std(usual, ddof=1), LARGE * step_ns))
    # From the rank's quicker steps: those that are far may be many, and of two ranks make the other's as far below.
    noise = float(np.median(mine) - np.quantile(mine, _QUICK)) / _SIGMAS_TO_QUICK
    far = (excess >= max(_FAR * noise, LARGE * step_ns)).sum(axis=1)
    others = float(np.median(np.delete(far, line)))
    return bool(far[line] >= max(_AGAIN, _OFTEN * steps, _OFTENER * others + 1))
