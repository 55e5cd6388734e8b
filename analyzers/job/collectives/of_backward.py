"""Gradients that are reduced in the backward: autograd issues the all-reduce, on every rank."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from perfscope.analyzers.job.collectives.matched import MatchedCollectives
from perfscope.analyzers.job.collectives.of_layers import needed_by_layers
from perfscope.analyzers.rank.partial import RankPartial


def reduced_in_backward_per_step(partials: Mapping[int, RankPartial], matched: MatchedCollectives, steps: int) -> float:
    """How many all-reduces of gradients there are in a step's backward; ``matched`` are those of so many steps."""
    of_rank_op = np.zeros(len(matched), dtype=np.bool_)
    for rank, partial in partials.items():
        lines = matched.lines_of(rank)
        of_rank_op[lines] = partial.collectives.backward[matched.index[lines]]
    found = matched.instances.is_kind(("all_reduce",)) & ~needed_by_layers(partials, matched)
    np.logical_and.at(found, matched.instance, of_rank_op)
    return int(found.sum()) / steps
