"""Steps that take far longer than those around them, again and again: what they cost the run, how regularly they come,
and on which rank.

A pause that comes every so many steps (a checkpoint, a log, an upload) is mostly missing from the few steps of a
capture, and where all ranks pause together none of them is slower than its peers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Final

from perfscope.results.history import LongSteps, OutlierStep

FEWEST: Final = 3
"""Such steps: what comes once or twice may be anything."""
LEAST_SHARE: Final = 0.02
"""Of the run's time, from which they are worth a word."""

_AS_LONG: Final = (0.3, 5.0)
"""Times what the third longest of them is longer by, within which they are of one kind: a compilation takes far longer,
noise far less."""
_CHANCE: Final = 0.01
"""Probability that steps which come by chance lie so many steps apart, from which they come regularly."""
_THERE: Final = 0.5
"""Of the steps at which they are due, the share at which they come, at least."""
_MOSTLY: Final = 2 / 3
"""Share of them that is one rank's."""
_OF_ALL: Final = 0.5
"""Part of what they take longer that every rank's own long steps take longer, at least."""
_NAMED_BEFORE: Final = ("evaluation", "checkpoint")
"""Stages that goodput has parts of its own for."""


def long_steps(
    outliers: Sequence[OutlierStep], counted: int, counted_us: float, *, least_us: float, compared: bool
) -> LongSteps | None:
    """What the ``outliers`` (the longest first, of ``counted`` steps that take ``counted_us`` together) have in common;
    None where they are few, or cost the run little.

    ``least_us``: what the outliers of the rank that has the least take longer, together. All ranks take as long for the
    run. So where one of them has no long steps, those of the others are waits for it, which come together now and then:
    ranks that average their parameters every few steps, say. ``compared``: were ranks compared, so that a step without
    a rank is nobody's alone?
    """
    measured = [(row, row.longer_us) for row in outliers if row.stage not in _NAMED_BEFORE]
    if len(measured) < FEWEST:
        return None
    chosen = [measured[at] for at in of_one_kind(range(len(measured)), [over for _, over in measured])]
    longer_us = sum(over for _, over in chosen)
    share = longer_us / counted_us if counted_us > 0 else 0.0
    if len(chosen) < FEWEST or share < LEAST_SHARE or least_us < _OF_ALL * longer_us:
        return None
    numbers = sorted(row.step for row, _ in chosen)
    (rank, stage), often = Counter((row.rank, row.stage) for row, _ in chosen).most_common(1)[0]
    told = often >= _MOSTLY * len(chosen)
    return LongSteps(
        steps=tuple(numbers),
        of_steps=counted,
        longer_us=fmean(over for _, over in chosen),
        share=min(share, 1.0),
        period=period_of(numbers),
        rank=rank if told else None,
        stage=stage if told else "",
        on_all_ranks=compared and all(row.rank is None for row, _ in chosen),
    )


def of_one_kind(steps: Iterable[int], over: Sequence[float]) -> list[int]:
    """Those of these steps (in order) that are longer than others, by ``over``, by about as much."""
    third = sorted(over, reverse=True)[min(FEWEST, len(over)) - 1]
    least, most = (times * third for times in _AS_LONG)
    return [step for step, value in zip(steps, over, strict=True) if least <= value <= most]


def period_of(numbers: Sequence[int], chance: float = _CHANCE) -> int | None:
    """From one of these steps (ascending) to the next, where they come regularly, some of them left out perhaps; None
    where that may be chance, of a larger probability than ``chance``: of n steps at random each but the first lies at
    a multiple of p after it with 1 / p.
    """
    if len(numbers) < FEWEST:
        return None
    period = math.gcd(*(after - before for before, after in pairwise(numbers)))
    due = (numbers[-1] - numbers[0]) // period + 1 if period else 0
    if period < 2 or len(numbers) < _THERE * due:
        return None
    return period if period ** -(len(numbers) - 1) <= chance else None
