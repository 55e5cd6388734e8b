"""Collectives that layers need for what they compute, beside those of gradients in the same group: the statistics of a
synchronized batch normalization, and the sums of its backward.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from perfscope.analyzers.job.collectives.matched import MatchedCollectives
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.trace.trace import NONE, Bool

Alike = tuple[str, str, str | None, int | None]
"""Group, kind, type and size: what a row of the summary's collectives is of."""


def needed_by_layers(partials: Mapping[int, RankPartial], matched: MatchedCollectives) -> Bool:
    """Which instances are such collectives on any rank."""
    found = np.zeros(len(matched.instances), dtype=np.bool_)
    for rank, partial in partials.items():
        lines = matched.lines_of(rank)
        mine = partial.collectives.of_layers[matched.index[lines]]
        found[matched.instance[lines[mine]]] = True
    return found


def rows_of_layers(partials: Mapping[int, RankPartial], matched: MatchedCollectives) -> frozenset[Alike]:
    """The rows of the summary's collectives most of which are such."""
    known = matched.instances
    needed = needed_by_layers(partials, matched)
    if not needed.any():
        return frozenset()
    way = np.stack((known.group, known.kind, known.dtype, known.bytes), axis=1)
    rows, which = np.unique(way, axis=0, return_inverse=True)
    most = 2 * np.bincount(which.ravel(), needed, len(rows)) > np.bincount(which.ravel(), minlength=len(rows))
    return frozenset(
        (
            known.groups[group].name,
            known.kinds[kind],
            None if dtype == NONE else known.dtypes[dtype],
            size if size >= 0 else None,
        )
        for group, kind, dtype, size in rows[most].tolist()
    )
