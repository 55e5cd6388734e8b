"""The same collective on every rank: matched by group and sequence, messages by their ends; clocks set by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from perfscope.analyzers.blocks import Blocks
from perfscope.analyzers.collectives.arrivals import Together, arrivals
from perfscope.analyzers.collectives.inferred_pairs import infer_pairs, silent_rows
from perfscope.analyzers.collectives.matched import Instances, Matched
from perfscope.analyzers.collectives.mismatches import Mismatch
from perfscope.analyzers.collectives.out_of_step import put_in_step
from perfscope.analyzers.collectives.participations import Participations, gather
from perfscope.analyzers.collectives.point_to_point import Pairs, exchanges, pair_messages
from perfscope.analyzers.collectives.sequences import number_collectives
from perfscope.analyzers.rank import RankPartial
from perfscope.clock import Clocks, align
from perfscope.passages import Passages
from perfscope.trace import NONE, Bool, Int64

__all__ = ["Instances", "Matched", "Mismatch", "match"]

_CLOCK_SAMPLES: Final = 48
"""Collectives of each group that clocks are set by, spread over the recording: medians gain nothing from more."""


def match(
    partials: Mapping[int, RankPartial], steps: Int64, hosts: Mapping[int, str] | None = None
) -> tuple[Matched, Clocks, tuple[Mismatch, ...]]:
    """Match the collectives that the ranks issued in ``steps`` and align their clocks by them.

    ``hosts`` names the ranks' hosts, where known; else the recordings' own word counts.
    """
    parts = gather(partials, steps)
    silent = silent_rows(parts)
    is_exchange = np.zeros(len(parts), dtype=np.bool_)
    is_exchange[parts.messages.part] = True
    is_exchange[silent] = True
    collectives = np.flatnonzero(~is_exchange)
    numbered = number_collectives(parts, collectives)
    pairs = pair_messages(parts)
    ranks = np.array(sorted(partials), dtype=np.int64)
    named = [(hosts or {}).get(int(rank)) or partials[int(rank)].host for rank in ranks]
    passages = _passages(parts, pairs)
    clocks = align(ranks, *_samples(parts, collectives, numbered.instance), named, passages)
    checked = put_in_step(parts, collectives, numbered.instance, clocks)
    if checked.inferred.any():
        clocks = align(ranks, *_samples(parts, collectives, checked.instance), named, passages)
    found = infer_pairs(parts, silent, clocks)
    instance = np.full(len(parts), NONE, dtype=np.int64)
    instance[collectives] = checked.instance
    inferred = np.zeros(len(parts), dtype=np.bool_)
    inferred[collectives] = checked.inferred
    inferred[found.sender] = inferred[found.receiver] = True
    together = _with_exchanges(parts, instance, is_exchange, inferred, pairs.and_(found))
    mismatches = (*numbered.mismatches, *checked.mismatches, *pairs.mismatches)
    return arrivals(parts, together, clocks), clocks, mismatches


def _samples(parts: Participations, rows: Int64, instance: Int64) -> tuple[Int64, Int64, Int64]:
    """(instance, rank, end) of participations that two ranks or more share, thinned."""
    shared = np.bincount(instance[instance != NONE], minlength=1) > 1
    usable = (instance != NONE) & shared[np.maximum(instance, 0)]
    rows, instance = rows[usable], instance[usable]
    blocks = Blocks.of(instance)
    group = parts.group[rows[blocks.order[blocks.first]]]
    each = Blocks.of(group)
    place, size = each.position, each.size[each.label]
    # As many as the samples, evenly spread: whenever their count goes up.
    taken = np.empty(len(group), dtype=np.bool_)
    taken[each.order] = (place + 1) * _CLOCK_SAMPLES // size > place * _CLOCK_SAMPLES // size
    kept = taken[blocks.labels()]
    return instance[kept], parts.rank[rows[kept]], parts.end_ns[rows[kept]]


def _passages(parts: Participations, pairs: Pairs) -> Passages:
    return Passages(
        sender=parts.rank[pairs.sender],
        receiver=parts.rank[pairs.receiver],
        send_start_ns=parts.start_ns[pairs.sender],
        send_end_ns=parts.end_ns[pairs.sender],
        receipt_end_ns=parts.end_ns[pairs.receiver],
        ends_tell=~parts.on_host[pairs.sender],
    )


def _with_exchanges(
    parts: Participations, instance: Int64, is_exchange: Bool, inferred: Bool, pairs: Pairs
) -> Together:
    """Number the exchanges, after the collectives, in ``instance``."""
    rows = np.flatnonzero(is_exchange)
    made = exchanges(parts, rows, pairs)
    instance[rows] = made.number + int(instance.max(initial=NONE)) + 1
    kept = pairs.where(made.bound)
    met = np.bincount(kept.sender, minlength=len(parts)) + np.bincount(kept.receiver, minlength=len(parts))
    ends = np.maximum(np.bincount(parts.messages.part, minlength=len(parts)), 1)
    return Together(instance, kept, is_exchange, is_exchange & (met < ends), inferred)
