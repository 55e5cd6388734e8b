"""Ranks that are slow for their work, where the work of all varies from step to step.

No such rank is the slowest of most steps, and what one has more to compute in some of them is no fault of its own. Its
pace is: how long it takes for as much work. With shapes that is its compute for as many FLOPs. Without, some kernels
show it, as those of an optimizer: their work does not depend on the batch, so that each takes as long in every step of
a rank however long the others take; on a slow rank all of them take longer, by about the same factor.

Example, compute of two ranks in three steps, and of their optimizers: 40 50 45 (4 4 4), and 63 50 56 (5 5 5). The
second rank is slow by 5 / 4: for the first one's work it would take 50 62 56, for its own the first one 50 40 45.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.rank.work.tables import OTHER_KERNELS
from perfscope.analyzers.replay.peers import Peers
from perfscope.analyzers.replay.stragglers.own_time import (
    flops_per_step,
    ns_per_flop,
    over_others,
    varies_by,
)
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Bool, Float64, Int64

_SLOWER: Final = 1.03
"""From this ratio of a rank's pace to its peers' on it is slow: kernels' durations differ by some percent."""
_STEADY: Final = 0.8
"""Share of the steps in which it must be, by at least half as much as usual."""
_FIXED: Final = 0.25
"""Part of what compute varies by from step to step, at most, that a kernel does whose work is always the same."""
_AGREE: Final = 0.25
"""Part of what a rank is slower by, at most, by which two such kernels may differ: their work is the same on all ranks,
as an optimizer's that updates other parameters on each is not."""
_SHOWS: Final = 1 / 3
"""Part of it, at least, by which all that it computes must take longer: by chance it has less work than the others."""


def slow_for_their_work(result: AlignedJob, peers: Peers, used: Bool) -> dict[int, float]:
    """Those of the peers that take longer for the same work in nearly all ``used`` steps, with how many times as long
    they take as the others; empty where the recording does not show their work.
    """
    flops = flops_per_step(result, peers.ranks)
    compute = peers.rows_ns[:, used, TimeCategory.COMPUTE].astype(np.float64)
    if flops.shape[1] < 2:
        return {}
    paces = _per_work(compute, flops) if flops.all() else _of_fixed_kernels(result, peers, varies_by(compute))
    slow = [_slower(pace) for pace in paces]
    if not slow:
        return {}
    least = np.min(slow, axis=0)
    agreed = (least >= _SLOWER) & (np.max(slow, axis=0) - least <= _AGREE * (least - 1))
    if not flops.all():  # by shards of other sizes a rank's optimizer takes longer, too, and nothing else
        agreed &= _slower(compute.mean(axis=1, keepdims=True)) - 1 >= _SHOWS * (least - 1)
    return {peers.ranks[line]: float(slow[0][line]) for line in np.flatnonzero(agreed).tolist()}


def longer_ns(peers: Peers, rank: int, factor: float) -> Int64:
    """[recorded step]: for how much longer a rank computes than one that is not ``factor`` times as slow."""
    compute = peers.rows_ns[peers.line_of(rank), :, TimeCategory.COMPUTE]
    return np.asarray(np.rint(compute * (1 - 1 / factor)), dtype=np.int64)


def spread_evenly_ns(peers: Peers, slower: Mapping[int, float]) -> Int64:
    """[rank, recorded step]: for how much longer each computes than it would with as much work as the others, where the
    ranks ``slower`` take so many times as long for the same.
    """
    factor = np.array([[slower.get(rank, 1.0)] for rank in peers.ranks])
    compute = peers.rows_ns[:, :, TimeCategory.COMPUTE]
    return np.asarray(np.rint(compute - factor * (compute / factor).mean(axis=0)), dtype=np.int64)


def _slower(pace: Float64) -> Float64:
    """How many times as long each rank (lines) takes as the median of the others; 1 where not in nearly all steps."""
    scaled = np.rint(pace / pace.mean() * 1e9).astype(np.int64)
    ratio = scaled / np.maximum(scaled - over_others(scaled), 1)
    usual = np.median(ratio, axis=1)
    steady = (ratio - 1 >= (usual[:, None] - 1) / 2).mean(axis=1) >= _STEADY
    return np.asarray(np.where(steady, usual, 1.0), dtype=np.float64)


def _per_work(compute: Float64, flops: Float64) -> list[Float64]:
    """Compute [rank, step] over what ranks with as many FLOPs take; empty where it does not grow with them. What takes
    as long however many there are, as an optimizer does, is part of the work.
    """
    each = ns_per_flop(flops, compute)
    if each <= 0:
        return []
    return [compute / (max(float(compute.mean()) - each * float(flops.mean()), 0.0) + each * flops)]


def _of_fixed_kernels(result: AlignedJob, peers: Peers, varies: float) -> list[Float64]:
    """Duration [rank, used step] of two kernels whose work is the same in all steps, those that take most time; empty
    where there are fewer. ``varies``: by how much compute does.
    """
    tables = [result.partials[rank].tables.kernels for rank in peers.ranks]
    steps = [result.partials[rank].steps.indices_of(result.steps) for rank in peers.ranks]
    lines = [
        {name: line for line, name in enumerate(table.names) if table.category[line] == "compute"} for table in tables
    ]
    names = set.intersection(*map(set, lines)) - {OTHER_KERNELS}
    found: dict[str, Float64] = {}
    for name in names:
        each = list(zip(tables, lines, steps, strict=True))
        count = np.stack([table.count[line[name], chosen] for table, line, chosen in each])
        total = np.stack([table.total_ns[line[name], chosen] for table, line, chosen in each]).astype(np.float64)
        if count.all() and (count == count[0, 0]).all() and varies_by(total) <= _FIXED * varies:
            found[name] = total
    longest = sorted(found, key=lambda name: (-float(found[name].sum()), name))[:2]
    return [found[name] for name in longest] if len(longest) == 2 else []
