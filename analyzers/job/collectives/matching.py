"""The same collective on every rank: matched by group and sequence, messages by their peers; clocks aligned by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from perfscope.analyzers.job.blocks import Blocks, where
from perfscope.analyzers.job.collectives.groups import unite
from perfscope.analyzers.job.collectives.matched import MatchedCollectives, Matching, arrivals
from perfscope.analyzers.job.collectives.point_to_point import (
    exchanges,
    infer_pairs,
    open_ends,
    pair_messages,
    silent_rows,
    unpaired_rows,
)
from perfscope.analyzers.job.collectives.sequences import number_collectives
from perfscope.analyzers.job.collectives.unmatched import MessageEnds, MessagePairs, Mismatch, UnmatchedOps
from perfscope.analyzers.rank.collectives.collectives import Group, Messages
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.frozen import dataclass
from perfscope.trace.clock import Clocks, SendRecvTimes, align
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Bool, Int64

_CLOCK_SAMPLES: Final = 48
"""Collectives of each group that clocks are set by, spread over the recording: medians gain nothing from more."""

_SYNCHRONIZING: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Kinds that no rank can leave before all ranks have arrived."""

_APART_NS: Final = 100_000
"""More than the error of clocks that collectives align."""

_SAME_END_NS: Final = 500_000
"""Ends of one collective lie closer together."""


def match(
    partials: Mapping[int, RankPartial], steps: Int64, hosts: Mapping[int, str] | None = None
) -> tuple[MatchedCollectives, Clocks, tuple[Mismatch, ...]]:
    """Match the collectives that the ranks issued in ``steps`` and align their clocks by them.

    ``hosts`` names the ranks' hosts, where known; else the traces name them.
    """
    ops = rank_ops(partials, steps)
    silent = silent_rows(ops)
    is_exchange = np.zeros(len(ops), dtype=np.bool_)
    is_exchange[ops.messages.op] = True
    is_exchange[silent] = True
    collectives = np.flatnonzero(~is_exchange)
    numbered = number_collectives(ops, collectives)
    pairs, unpaired = pair_messages(ops)
    ranks = np.array(sorted(partials), dtype=np.int64)
    named = [(hosts or {}).get(int(rank)) or partials[int(rank)].host for rank in ranks]
    messages = _send_recv_times(ops, pairs)
    clocks = align(ranks, *_samples(ops, collectives, numbered.instance), named, messages)
    checked = check_by_time(ops, collectives, numbered.instance, clocks)
    if checked.inferred.any():
        clocks = align(ranks, *_samples(ops, collectives, checked.instance), named, messages)
    inferred_pairs = infer_pairs(ops, silent, clocks)
    while len(silent) and not clocks.aligned.all():
        # Clocks that nothing else connects: by the rhythm of messages, a stage further each time.
        known, left = _send_recv_times(ops, pairs.and_(inferred_pairs)), unpaired_rows(ops, silent, inferred_pairs)
        samples = _samples(ops, collectives, checked.instance)
        further = align(ranks, *samples, named, known, open_ends(ops, left))
        if further.aligned.sum() <= clocks.aligned.sum():
            break
        clocks, inferred_pairs = further, infer_pairs(ops, silent, further)
    instance = np.full(len(ops), NONE, dtype=np.int64)
    instance[collectives] = checked.instance
    inferred = np.zeros(len(ops), dtype=np.bool_)
    inferred[collectives] = checked.inferred
    inferred[inferred_pairs.sender] = inferred[inferred_pairs.receiver] = True
    matching = _with_exchanges(ops, instance, is_exchange, inferred, pairs.and_(inferred_pairs))
    mismatches = (*numbered.mismatches, *checked.mismatches, *unpaired)
    return arrivals(ops, matching, clocks), clocks, mismatches


def _samples(ops: UnmatchedOps, rows: Int64, instance: Int64) -> tuple[Int64, Int64, Int64]:
    """(instance, rank, end) of collectives that two ranks or more share, thinned."""
    shared = np.bincount(instance[instance != NONE], minlength=1) > 1
    usable = (instance != NONE) & shared[np.maximum(instance, 0)]
    rows, instance = rows[usable], instance[usable]
    blocks = Blocks.of(instance)
    group = ops.group[rows[blocks.order[blocks.first]]]
    each = Blocks.of(group)
    place, size = each.position, each.size[each.label]
    # As many as the samples, evenly spread: whenever their count goes up.
    taken = np.empty(len(group), dtype=np.bool_)
    taken[each.order] = (place + 1) * _CLOCK_SAMPLES // size > place * _CLOCK_SAMPLES // size
    kept = taken[blocks.labels()]
    return instance[kept], ops.rank[rows[kept]], ops.end_ns[rows[kept]]


def _send_recv_times(ops: UnmatchedOps, pairs: MessagePairs) -> SendRecvTimes:
    _, kernel = np.unique(np.append(pairs.sender, pairs.receiver), return_inverse=True)
    return SendRecvTimes(
        sender=ops.rank[pairs.sender],
        receiver=ops.rank[pairs.receiver],
        send_start_ns=ops.start_ns[pairs.sender],
        send_end_ns=ops.end_ns[pairs.sender],
        recv_end_ns=ops.end_ns[pairs.receiver],
        recv_ends_with_send=~ops.on_host[pairs.sender],
        recv_start_ns=ops.start_ns[pairs.receiver],
        kernels=(kernel[: len(pairs)], kernel[len(pairs) :]),
    )


def _with_exchanges(
    ops: UnmatchedOps, instance: Int64, is_exchange: Bool, inferred: Bool, pairs: MessagePairs
) -> Matching:
    """Number the exchanges, after the collectives, in ``instance``."""
    rows = np.flatnonzero(is_exchange)
    number, bound = exchanges(ops, rows, pairs)
    instance[rows] = number + int(instance.max(initial=NONE)) + 1
    kept = where(pairs, bound)
    alone = np.zeros(len(ops), dtype=np.bool_)
    alone[unpaired_rows(ops, rows, kept)] = True
    return Matching(instance, kept, is_exchange, alone, inferred)


def rank_ops(partials: Mapping[int, RankPartial], steps: Int64) -> UnmatchedOps:
    """The collectives that the ranks issued in ``steps``."""
    groups, places = unite({rank: partials[rank].collectives.groups for rank in partials})
    kinds: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    columns: list[dict[str, NDArray[Any]]] = []
    ends: list[dict[str, NDArray[Any]]] = []
    count = 0
    for rank in sorted(partials):
        own, number = partials[rank].collectives, partials[rank].steps.number
        step = np.where(own.step >= 0, number[np.maximum(own.step, 0)], NONE)
        kept = np.flatnonzero(np.isin(step, steps))
        group = np.array(places[rank], dtype=np.int64)
        kind = np.array([kinds.setdefault(each, len(kinds)) for each in own.kinds], dtype=np.int64)
        dtype = np.array([dtypes.setdefault(each, len(dtypes)) for each in own.dtypes] + [NONE], dtype=np.int64)
        columns.append({
            "rank": np.full(len(kept), rank, dtype=np.int64), "index": kept, "start_ns": own.start_ns[kept],
            "end_ns": own.end_ns[kept], "group": group[own.group[kept]], "kind": kind[own.kind[kept]],
            "dtype": dtype[own.dtype[kept]], "bytes": own.bytes[kept], "step": step[kept],
            "sequence": own.sequence[kept], "on_host": np.full(len(kept), own.on_host, dtype=np.bool_),
        })  # fmt: skip
        op = np.full(len(own), NONE, dtype=np.int64)
        op[kept] = count + np.arange(len(kept))
        ends.append(_ends(rank, own.messages, op))
        count += len(kept)
    joined = _joined(columns)
    messages = MessageEnds(**_joined(ends))
    return UnmatchedOps(
        **joined,
        groups=groups,
        kinds=tuple(kinds),
        dtypes=tuple(dtypes),
        messages=_with_only_peers(messages, joined["group"], joined["rank"], groups),
        recorded={rank: steps[np.isin(steps, partials[rank].steps.number)] for rank in sorted(partials)},
    )


def _joined(columns: Sequence[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate([each[name] for each in columns]) for name in columns[0]}


def _ends(rank: int, own: Messages, op: Int64) -> dict[str, NDArray[Any]]:
    """One rank's ends of messages, ``op`` being the rank op of each of its collectives (NONE: left out)."""
    op = op[own.collective]
    kept = op != NONE
    peer, sends = own.peer[kept], own.sends[kept]
    return {
        "op": op[kept],
        "source": np.where(sends, rank, peer),
        "destination": np.where(sends, peer, rank),
        "sent": sends,
        "bytes": own.bytes[kept],
    }


def _with_only_peers(ends: MessageEnds, group: Int64, rank: Int64, groups: Sequence[Group]) -> MessageEnds:
    """With the peers that are known anyway: in a group of two there is only one."""
    sums = np.array([sum(each.ranks) if len(each.ranks) == 2 else NONE for each in groups] or [NONE], dtype=np.int64)
    other = sums[group[ends.op]]
    other = np.where(other == NONE, NONE, other - rank[ends.op])
    return replace(
        ends,
        source=np.where(ends.source == NONE, other, ends.source),
        destination=np.where(ends.destination == NONE, other, ends.destination),
    )


@dataclass(frozen=True, eq=False)
class CheckedInstances:
    """``instance`` of each row, matched by time where order was wrong (``inferred``), and the mismatches."""

    instance: Int64
    inferred: Bool
    mismatches: tuple[Mismatch, ...]


def check_by_time(ops: UnmatchedOps, rows: Int64, instance: Int64, clocks: Clocks) -> CheckedInstances:
    """Check the instances of collectives against time, and match those of doubtful steps by their ends.

    No rank leaves an all-reduce before the last arrival. Where rank ops that order matches did not run at one time, the
    profiler dropped kernels (a full buffer, sampling), different ones on each rank. Ends, by contrast, are nearly the
    same on all ranks.
    """
    unchanged = CheckedInstances(instance, np.zeros(len(rows), dtype=np.bool_), ())
    aligned = clocks.aligned[np.searchsorted(clocks.ranks, ops.rank[rows])]
    usable = np.flatnonzero(ops.is_kind(_SYNCHRONIZING)[rows] & aligned & ~ops.on_host[rows] & (instance != NONE))
    start = clocks.to_common(ops.rank[rows], ops.start_ns[rows])
    end = clocks.to_common(ops.rank[rows], ops.end_ns[rows])
    apart = _never_met(instance[usable], start[usable], end[usable])
    if not apart.any():
        return unchanged
    steps = Blocks.of(ops.group[rows[usable]], ops.step[rows[usable]])
    label = steps.labels()
    doubtful = np.isin(label, distinct(label[apart]))
    checked = usable[doubtful]
    renumbered, met = _by_ends(ops, rows[checked], start[checked], end[checked])
    mismatches = tuple(
        ops.mismatch(
            rows[usable[steps.rows(each)[0]]],
            f"{(apart & (label == each)).sum()} of the ranks' kernels never ran at one time with those that should be "
            "the same collective, so that kernels are missing from the recording",
        )
        for each in distinct(label[apart]).tolist()
    )
    if met.sum() < (~apart & doubtful).sum():  # no better than order: the clocks are not good enough for this
        return CheckedInstances(instance, unchanged.inferred, mismatches)
    result, inferred = instance.copy(), unchanged.inferred.copy()
    result[checked] = renumbered + int(instance.max()) + 1
    inferred[checked] = met
    return CheckedInstances(result, inferred, mismatches)


def _never_met(instance: Int64, start: Int64, end: Int64) -> Bool:
    """Which rank ops belong to an instance that one rank left before the last arrival."""
    blocks = Blocks.of(instance)
    if len(blocks) == 0:
        return np.zeros(0, dtype=np.bool_)
    last_start = np.maximum.reduceat(start[blocks.order], blocks.first)
    first_end = np.minimum.reduceat(end[blocks.order], blocks.first)
    return np.asarray((last_start > first_end + _APART_NS)[blocks.labels()])


def _by_ends(ops: UnmatchedOps, rows: Int64, start: Int64, end: Int64) -> tuple[Int64, Bool]:
    """(number of the instance of each row, from 0; whether it has another rank op): runs of nearly equal ends."""
    order = np.lexsort((end, ops.kind[rows], ops.step[rows], ops.group[rows]))
    chosen = rows[order]
    begins = np.ones(len(rows), dtype=np.bool_)
    same = np.ones(len(rows) - 1, dtype=np.bool_)
    for column in (ops.group, ops.step, ops.kind):
        same &= column[chosen][1:] == column[chosen][:-1]
    begins[1:] = ~same | (np.diff(end[order]) > _SAME_END_NS)
    number = np.empty(len(rows), dtype=np.int64)
    number[order] = np.cumsum(begins) - 1
    # A rank twice in one run, or one that left before another arrived: not one collective.
    blocks = Blocks.of(number)
    owners = Blocks.of(number, ops.rank[rows])
    bad = np.zeros(len(blocks), dtype=np.bool_)
    bad[number[owners.order[owners.first[owners.size > 1]]]] = True
    bad[number[_never_met(number, start, end)]] = True
    met = ((blocks.size > 1) & ~bad)[number]
    return np.where(met, number, len(blocks) + np.arange(len(rows))), met
