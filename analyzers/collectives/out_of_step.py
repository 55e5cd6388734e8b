"""Collectives whose participants cannot have met: kernels are missing from some rank's recording, and order misled.

Nobody leaves an all-reduce before the last one has come. Where the participants that order puts together did not run at
one time, recorders have dropped kernels (a full buffer, sampling), no two ranks' the same. The collectives of such a
step are put together by their ends instead, which are nearly the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.blocks import Blocks
from perfscope.analyzers.collectives.mismatches import Mismatch
from perfscope.analyzers.collectives.participations import Participations
from perfscope.clock import Clocks
from perfscope.trace import NONE, Bool, Int64

_MEETINGS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Kinds that no rank can leave before all have come."""

_APART_NS: Final = 100_000
"""More than clocks are ever wrong by where collectives align them."""

_SAME_END_NS: Final = 500_000
"""Ends of one collective lie closer together."""


@dataclass(frozen=True, eq=False)
class InStep:
    """``instance`` of each row, anew where order misled (``inferred``), and what there is to say about it."""

    instance: Int64
    inferred: Bool
    mismatches: tuple[Mismatch, ...]


def put_in_step(parts: Participations, rows: Int64, instance: Int64, clocks: Clocks) -> InStep:
    """Check the instances of collectives against time, and put those of doubtful steps together by their ends."""
    unchanged = InStep(instance, np.zeros(len(rows), dtype=np.bool_), ())
    meets = np.array([kind in _MEETINGS for kind in parts.kinds] or [False], dtype=np.bool_)[parts.kind[rows]]
    aligned = clocks.aligned[np.searchsorted(clocks.ranks, parts.rank[rows])]
    usable = np.flatnonzero(meets & aligned & ~parts.on_host[rows] & (instance != NONE))
    start = clocks.to_common(parts.rank[rows], parts.start_ns[rows])
    end = clocks.to_common(parts.rank[rows], parts.end_ns[rows])
    apart = _never_met(instance[usable], start[usable], end[usable])
    if not apart.any():
        return unchanged
    steps = Blocks.of(parts.group[rows[usable]], parts.step[rows[usable]])
    label = steps.labels()
    doubtful = np.isin(label, np.unique(label[apart]))
    anew, met = _by_ends(parts, rows[usable[doubtful]], start[usable[doubtful]], end[usable[doubtful]])
    mismatches = tuple(_told(parts, rows[usable[steps.order[steps.first[each]]]], int((apart & (label == each)).sum()))
                       for each in np.unique(label[apart]).tolist())  # fmt: skip
    if met.sum() < (~apart & doubtful).sum():  # no better than order: the clocks are not good enough for this
        return InStep(instance, unchanged.inferred, mismatches)
    result, inferred = instance.copy(), unchanged.inferred.copy()
    result[usable[doubtful]] = anew + int(instance.max()) + 1
    inferred[usable[doubtful]] = met
    return InStep(result, inferred, mismatches)


def _never_met(instance: Int64, start: Int64, end: Int64) -> Bool:
    """Which participations belong to an instance whose first to leave left before the last one came."""
    blocks = Blocks.of(instance)
    if len(blocks) == 0:
        return np.zeros(0, dtype=np.bool_)
    last_start = np.maximum.reduceat(start[blocks.order], blocks.first)
    first_end = np.minimum.reduceat(end[blocks.order], blocks.first)
    return np.asarray((last_start > first_end + _APART_NS)[blocks.labels()])


def _by_ends(parts: Participations, rows: Int64, start: Int64, end: Int64) -> tuple[Int64, Bool]:
    """(number of the instance of each row, from 0; whether it meets any other): runs of nearly equal ends."""
    order = np.lexsort((end, parts.kind[rows], parts.step[rows], parts.group[rows]))
    chosen = rows[order]
    begins = np.ones(len(rows), dtype=np.bool_)
    same = np.ones(len(rows) - 1, dtype=np.bool_)
    for column in (parts.group, parts.step, parts.kind):
        same &= column[chosen][1:] == column[chosen][:-1]
    begins[1:] = ~same | (np.diff(end[order]) > _SAME_END_NS)
    number = np.empty(len(rows), dtype=np.int64)
    number[order] = np.cumsum(begins) - 1
    # A rank twice in one run, or one that had left before another came: no collective.
    blocks = Blocks.of(number)
    owners = Blocks.of(number, parts.rank[rows])
    bad = np.zeros(len(blocks), dtype=np.bool_)
    bad[number[owners.order[owners.first[owners.size > 1]]]] = True
    bad[number[_never_met(number, start, end)]] = True
    met = ((blocks.size > 1) & ~bad)[number]
    return np.where(met, number, len(blocks) + np.arange(len(rows))), met


def _told(parts: Participations, row: int, count: int) -> Mismatch:
    return Mismatch(
        parts.groups[int(parts.group[row])].name,
        int(parts.step[row]),
        f"{count} of the ranks' kernels never ran at one time with those that should be the same collective, so that "
        "kernels are missing from the recording",
    )
