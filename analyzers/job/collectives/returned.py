"""Gradients that are reduced to one rank, and broadcast back before the optimizer's step: data parallelism, in two
collectives for each. Where optimizers are sharded, parameters are broadcast, after the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from perfscope.analyzers.job.collectives.matched import MatchedCollectives
from perfscope.analyzers.job.collectives.of_loop import by_stretch
from perfscope.analyzers.rank.loop_phases import BEFORE_OPTIMIZER
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.trace.trace import Bool


def returned_gradients(partials: Mapping[int, RankPartial], matched: MatchedCollectives) -> Bool:
    """Which instances are reductions after the backward that a broadcast follows, of as many bytes in the same group
    before the optimizer's step, and these broadcasts.
    """
    known = matched.instances
    found = np.zeros(len(known), dtype=np.bool_)
    reduces = known.is_kind(("reduce",))
    here = by_stretch(partials, matched)[BEFORE_OPTIMIZER] & (reduces | known.is_kind(("broadcast",)))
    waiting = defaultdict[tuple[int, ...], list[int]](list)
    alike = np.stack((known.step, known.group, known.dtype, known.bytes), axis=1)
    for number in np.flatnonzero(here).tolist():
        key = tuple(alike[number].tolist())
        if reduces[number]:
            waiting[key].append(number)
        elif waiting[key]:
            found[[number, waiting[key].pop(0)]] = True
    return found


def groups_of_returned(partials: Mapping[int, RankPartial], matched: MatchedCollectives) -> frozenset[int]:
    """Groups most of whose reductions to one rank are such."""
    known = matched.instances
    reduces, returned = known.is_kind(("reduce",)), returned_gradients(partials, matched)
    groups = set(known.group[reduces & returned].tolist())
    return frozenset(group for group in groups if 2 * returned[reduces & (known.group == group)].mean() > 1)


def returned_per_step(partials: Mapping[int, RankPartial], matched: MatchedCollectives, steps: int) -> float:
    """How many gradients a step reduces and broadcasts so; ``matched`` are the collectives of so many steps."""
    return int(returned_gradients(partials, matched).sum()) / 2 / steps
