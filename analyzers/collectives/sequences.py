"""Collectives of all ranks paired up: by recorded numbers, else by the order in which each rank issued them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.blocks import Blocks
from perfscope.analyzers.collectives.mismatches import Mismatch, by_value, called
from perfscope.analyzers.collectives.participations import Participations
from perfscope.analyzers.collectives.unlike_orders import UNEVEN, resolve
from perfscope.trace import NONE, Bool, Int64

_COMPARABLE: Final = 0.5
"""Share of a group's collectives that must find a partner by their numbers for these to mean the same on all ranks."""


@dataclass(frozen=True, eq=False)
class Numbered:
    """``instance`` of each row: rows of one collective have one number, from 0; NONE where it cannot be paired up."""

    instance: Int64
    mismatches: tuple[Mismatch, ...] = ()


def number_collectives(parts: Participations, rows: Int64) -> Numbered:
    """Pair up the participations at ``rows``, which are of kinds that all ranks of a group take part in.

    By recorded sequence numbers where every rank of a group has them; else by order of occurrence within the step,
    checked by kind, type and size.
    """
    known = parts.expected[parts.group[rows]] > 0
    by_number = known & _numbers_are_comparable(parts, rows)
    instance = np.full(len(rows), NONE, dtype=np.int64)
    # Which ranks belong together is not known: every participation stands alone.
    following = int((~known).sum())
    instance[~known] = np.arange(following)
    mismatches: list[Mismatch] = []
    for chosen, number in ((by_number, _by_number), (known & ~by_number, _by_order)):
        found = number(parts, rows[chosen])
        instance[chosen] = np.where(found.instance == NONE, NONE, found.instance + following)
        following += int(found.instance.max(initial=NONE)) + 1
        mismatches += found.mismatches
    return Numbered(instance, tuple(sorted(mismatches, key=lambda each: (each.step, each.group))))


def _numbers_are_comparable(parts: Participations, rows: Int64) -> Bool:
    """For each row: can its group be matched by number?

    Every rank must have recorded them, and they must count the same things: NCCL's also count batches of sends and
    receipts, of which ranks issue unlike numbers (torch's ProcessGroupNCCL::startCoalescing).
    """
    group, groups = parts.group[rows], len(parts.groups)
    silent = np.bincount(group, weights=parts.sequence[rows] == NONE, minlength=groups) > 0
    mixed = np.isin(np.arange(groups), parts.group[parts.one_way & ~parts.on_host])
    blocks = Blocks.of(group, parts.sequence[rows])
    pairs = (blocks.size > 1)[blocks.labels()]
    owners = Blocks.of(group, parts.rank[rows])
    several = np.bincount(group[owners.order[owners.first]], minlength=groups) > 1
    paired = np.bincount(group, weights=pairs, minlength=groups) >= _COMPARABLE * np.bincount(group, minlength=groups)
    return (~silent & ~mixed & (paired | ~several))[group]


def _by_number(parts: Participations, rows: Int64) -> Numbered:
    # A collective that takes several kernels has one number for all of them.
    again = Blocks.of(parts.group[rows], parts.sequence[rows], parts.rank[rows]).positions()
    blocks = Blocks.of(parts.group[rows], parts.sequence[rows], again)
    instance = blocks.labels()
    mismatches = [
        *_contradictions(parts, rows, blocks, instance),
        *_gaps(parts, rows, blocks),
    ]
    return Numbered(instance, tuple(mismatches))


def _contradictions(parts: Participations, rows: Int64, blocks: Blocks, instance: Int64) -> Iterator[Mismatch]:
    """Of one number but of unlike kinds or sizes: taken apart (in ``instance``) and told."""
    ordered = rows[blocks.order]
    model = ordered[blocks.first[blocks.label]]
    unlike = np.unique(blocks.label[~_alike(parts, ordered, model, sizes_may_differ=True)])
    following = len(blocks)
    for label in unlike.tolist():
        own = blocks.order[blocks.first[label] : blocks.first[label] + blocks.size[label]]
        instance[own] = following + np.arange(len(own))
        following += len(own)
        said = {
            int(parts.rank[row]): called(parts.kinds[parts.kind[row]], int(parts.bytes[row]))
            for row in rows[own].tolist()
        }
        text, ranks = by_value(said)
        row = rows[own[0]]
        yield Mismatch(
            parts.groups[int(parts.group[row])].name,
            int(parts.step[row]),
            f"number {parts.sequence[row]} is not the same collective on all ranks ({text})",
            ranks,
        )


def _gaps(parts: Participations, rows: Int64, blocks: Blocks) -> Iterator[Mismatch]:
    """Numbers that a rank lacks between two that it has, one sentence for each group and step.

    What a rank lacks before its first or after its last was issued outside its recording.
    """
    present = _present(parts)
    lacking = np.flatnonzero(blocks.size < present[parts.group[rows[blocks.order[blocks.first]]]])
    if len(lacking) == 0:
        return
    spans = Blocks.of(parts.group[rows], parts.rank[rows])
    numbers = parts.sequence[rows][spans.order]
    low, high = np.minimum.reduceat(numbers, spans.first), np.maximum.reduceat(numbers, spans.first)
    owner = rows[spans.order[spans.first]]
    missing: dict[tuple[int, int], dict[int, int]] = {}
    example: dict[tuple[int, int], int] = {}
    for label in lacking.tolist():
        own = rows[blocks.order[blocks.first[label] : blocks.first[label] + blocks.size[label]]]
        group, sequence = parts.group[own[0]], parts.sequence[own[0]]
        around = (parts.group[owner] == group) & (low < sequence) & (sequence < high)
        key = (int(group), int(parts.step[own[0]]))
        for rank in np.setdiff1d(parts.rank[owner[around]], parts.rank[own]).tolist():
            missing.setdefault(key, {})[rank] = missing.get(key, {}).get(rank, 0) + 1
            example.setdefault(key, int(own[0]))
    for (group, step), count in sorted(missing.items()):
        text, _ = by_value({rank: f"{lacks} missing" for rank, lacks in count.items()})
        row = example[group, step]
        what = called(parts.kinds[parts.kind[row]], int(parts.bytes[row]))
        yield Mismatch(
            parts.groups[group].name,
            step,
            f"some ranks lack collectives that the others issued ({text}), the first of them {what}",
            tuple(sorted(count)),
        )


def _by_order(parts: Participations, rows: Int64) -> Numbered:
    blocks = Blocks.of(parts.group[rows], parts.step[rows])
    ordered = rows[blocks.order]
    runs = Blocks.of(blocks.label, parts.rank[ordered])  # already in this order: rows come rank by rank
    position, owner = runs.position, blocks.label[runs.first]
    first_run = np.searchsorted(owner, np.arange(len(blocks)))
    length = runs.size[first_run]
    place = np.minimum(position, length[blocks.label] - 1)
    model = ordered[blocks.first[blocks.label] + place]
    fits = _alike(parts, ordered, model, sizes_may_differ=False) & (runs.size[runs.label] == length[blocks.label])
    good = np.bincount(blocks.label, weights=~fits, minlength=len(blocks)) == 0
    longest = np.maximum.reduceat(runs.size, first_run) if len(blocks) else length
    # Left room for as many as all runs hold, should none of them pair up.
    room = np.where(good, longest, blocks.size)
    base = np.cumsum(room) - room
    number = np.where(good[blocks.label], base[blocks.label] + position, NONE)
    mismatches = list(_absent(parts, ordered, blocks, owner))
    for label in np.flatnonzero(~good).tolist():
        own = slice(blocks.first[label], blocks.first[label] + blocks.size[label])
        members = ordered[own]
        ranks, begins = np.unique(parts.rank[members], return_index=True)
        pieces = np.split(np.arange(len(members)), begins[1:])
        what = np.stack((parts.kind[members], parts.dtype[members], parts.bytes[members]), axis=1)
        found = resolve(what, dict(zip(ranks.tolist(), pieces, strict=True)), parts.kinds)
        number[own] = np.where(found.number == NONE, NONE, found.number + base[label])
        if found.text:
            row = members[0]
            name = parts.groups[int(parts.group[row])].name
            mismatches.append(Mismatch(name, int(parts.step[row]), found.text, found.ranks))
    instance = np.full(len(rows), NONE, dtype=np.int64)
    instance[blocks.order] = number
    return Numbered(instance, tuple(mismatches))


def _alike(parts: Participations, rows: Int64, models: Int64, *, sizes_may_differ: bool) -> Bool:
    """Do two participations say the same, as far as both say anything? Sizes may differ only of kinds that allow it."""
    unknown = np.array([kind == "unknown" for kind in parts.kinds], dtype=np.bool_)
    kinds = parts.kind[rows], parts.kind[models]
    same = (kinds[0] == kinds[1]) | unknown[kinds[0]] | unknown[kinds[1]]
    for column in (parts.dtype, parts.bytes):
        said = column[rows], column[models]
        agree = (said[0] == said[1]) | (said[0] == NONE) | (said[1] == NONE)
        if sizes_may_differ:
            uneven = np.array([kind in UNEVEN for kind in parts.kinds], dtype=np.bool_)
            agree |= uneven[kinds[0]]
        same &= agree
    return np.asarray(same)


def _present(parts: Participations) -> Int64:
    """For each group, how many of its ranks are in the recording; where they are not listed, how many were seen."""
    recorded = set(parts.recorded)
    seen = Blocks.of(parts.group, parts.rank)
    counts = np.bincount(parts.group[seen.order[seen.first]], minlength=len(parts.groups))
    listed = [len(recorded.intersection(group.ranks)) for group in parts.groups]
    return np.maximum(counts, np.array(listed or [0], dtype=np.int64))


def _absent(parts: Participations, ordered: Int64, blocks: Blocks, owner: Int64) -> Iterator[Mismatch]:
    """Ranks of a group that issued nothing in a step in which the others did."""
    if len(blocks) == 0:
        return
    group = parts.group[ordered[blocks.first]]
    short = np.flatnonzero(np.bincount(owner, minlength=len(blocks)) < _present(parts)[group])
    for label in short.tolist():
        rows = ordered[blocks.first[label] : blocks.first[label] + blocks.size[label]]
        of = parts.groups[group[label]]
        step = int(parts.step[rows[0]])
        issued = set(parts.rank[rows].tolist())
        members = of.ranks or parts.rank[parts.group == group[label]].tolist()
        ranks = tuple(sorted({rank for rank in members if rank in parts.recorded} - issued))
        counts, _ = by_value(dict.fromkeys(ranks, "none") | dict.fromkeys(issued, "some"))
        yield Mismatch(of.name, step, f"not all ranks issued a collective ({counts})", ranks)
