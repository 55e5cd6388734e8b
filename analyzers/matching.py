"""The same collective on every rank: matched by group and sequence, with arrivals, waits and transfers.

Arrival of a rank is the start of its kernel, aligned. Wait = last arrival - own arrival; transfer = end - last arrival.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from perfscope.analyzers.communication import Group
from perfscope.analyzers.rank import RankPartial
from perfscope.clock import Clocks, align
from perfscope.trace import NONE, Bool, Int64


@dataclass(frozen=True, eq=False)
class Matched:
    """Participations in matched collectives, ordered by instance, then rank: parallel arrays of one length.

    ``index`` is the row in that rank's ``Collectives``. Times are aligned ns. ``last_arrival_ns`` is the instance's
    last arrival, never outside the participation's own ``[start_ns, end_ns]``. Instances are described by
    ``instances``.
    """

    instance: Int64
    rank: Int64
    index: Int64
    start_ns: Int64
    end_ns: Int64
    last_arrival_ns: Int64
    instances: Instances
    clocks: Clocks

    def __len__(self) -> int:
        return len(self.instance)

    def offset_of(self, rank: int) -> int:
        """What was added to the rank's own clock, ns."""
        return self.clocks.offset_of(rank)

    def of_steps(self, steps: Int64) -> Matched:
        """The part that belongs to ``steps``; instances keep their order and are numbered anew."""
        kept = np.isin(self.instances.step, steps)
        lines = kept[self.instance]
        number = np.cumsum(kept) - 1
        return Matched(
            number[self.instance[lines]],
            self.rank[lines],
            self.index[lines],
            self.start_ns[lines],
            self.end_ns[lines],
            self.last_arrival_ns[lines],
            self.instances.where(kept),
            self.clocks,
        )

    @property
    def wait_ns(self) -> Int64:
        """How long each participant waited for the last one."""
        return self.last_arrival_ns - self.start_ns

    @property
    def transfer_ns(self) -> Int64:
        """From the last arrival to each participant's end."""
        return self.end_ns - self.last_arrival_ns


@dataclass(frozen=True, eq=False)
class Instances:
    """One line for each matched collective, in order of its last arrival. ``groups`` and ``kinds`` are indexed.

    ``complete``: every participant is in the recording, so that the last arrival is known; otherwise it is bounded by
    the shortest duration present (the last arriver's own duration is the transfer, and it is at most that long).
    ``last_rank`` is the last arriver, NONE where it is not known.
    """

    group: Int64
    kind: Int64
    dtype: Int64
    bytes: Int64
    step: Int64
    """The job's step number; NONE outside all steps."""
    participants: Int64
    complete: Bool
    last_rank: Int64
    last_arrival_ns: Int64
    groups: tuple[Group, ...]
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.group)

    def where(self, kept: Bool) -> Instances:
        """The instances for which ``kept`` holds."""
        return replace(
            self,
            group=self.group[kept],
            kind=self.kind[kept],
            dtype=self.dtype[kept],
            bytes=self.bytes[kept],
            step=self.step[kept],
            participants=self.participants[kept],
            complete=self.complete[kept],
            last_rank=self.last_rank[kept],
            last_arrival_ns=self.last_arrival_ns[kept],
        )


@dataclass(frozen=True)
class Mismatch:
    """Collectives that do not pair up: a group in which ranks issued different sequences in one step."""

    group: str
    step: int
    text: str


@dataclass(frozen=True, eq=False)
class _Participations:
    """All collectives of all ranks of the used steps, side by side, with job-wide numbering of the labels."""

    rank: Int64
    index: Int64
    start_ns: Int64
    end_ns: Int64
    group: Int64
    kind: Int64
    dtype: Int64
    bytes: Int64
    step: Int64
    sequence: Int64
    groups: tuple[Group, ...]
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]


def match(partials: Mapping[int, RankPartial], steps: Int64) -> tuple[Matched, Clocks, tuple[Mismatch, ...]]:
    """Match the collectives of the used steps across ranks and align the clocks by them."""
    parts = _gather(partials, steps)
    instance, mismatches = _number_instances(parts)
    ranks = np.array(sorted(partials), dtype=np.int64)
    together = _shared(instance)
    hosts = [partials[int(rank)].host for rank in ranks]
    clocks = align(ranks, instance[together], parts.rank[together], parts.end_ns[together], hosts)
    return _arrivals(parts, instance, clocks), clocks, mismatches


def _gather(partials: Mapping[int, RankPartial], steps: Int64) -> _Participations:
    groups: dict[Group, int] = {}
    kinds: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    columns: list[tuple[Int64, ...]] = []
    for rank in sorted(partials):
        own = partials[rank].collectives
        number = partials[rank].steps.number
        step = np.where(own.step >= 0, number[np.maximum(own.step, 0)], NONE)
        kept = np.flatnonzero(np.isin(step, steps))
        group = np.array([groups.setdefault(group, len(groups)) for group in own.groups], dtype=np.int64)
        kind = np.array([kinds.setdefault(kind, len(kinds)) for kind in own.kinds], dtype=np.int64)
        dtype = np.array([dtypes.setdefault(dtype, len(dtypes)) for dtype in own.dtypes] + [NONE], dtype=np.int64)
        columns.append((
            np.full(len(kept), rank, dtype=np.int64), kept, own.start_ns[kept], own.end_ns[kept],
            group[own.group[kept]], kind[own.kind[kept]], dtype[own.dtype[kept]], own.bytes[kept], step[kept],
            own.sequence[kept],
        ))  # fmt: skip
    joined = iter([np.concatenate(column) for column in zip(*columns, strict=True)])
    return _Participations(
        rank=next(joined), index=next(joined), start_ns=next(joined), end_ns=next(joined), group=next(joined),
        kind=next(joined), dtype=next(joined), bytes=next(joined), step=next(joined), sequence=next(joined),
        groups=tuple(groups), kinds=tuple(kinds), dtypes=tuple(dtypes),
    )  # fmt: skip


def _number_instances(parts: _Participations) -> tuple[Int64, tuple[Mismatch, ...]]:
    """Give participations in one collective one number; NONE where a collective cannot be matched.

    By recorded sequence numbers where every rank of a group has them; else by order of occurrence within the step,
    checked by kind, type and size. Where the orders differ (two backend threads that start a pair of collectives in
    either order), equals are matched in order; what is then left over is reported.
    """
    instance = np.full(len(parts.rank), NONE, dtype=np.int64)
    mismatches: list[Mismatch] = []
    following = 0
    for group_index, group in enumerate(parts.groups):
        members = np.flatnonzero(parts.group == group_index)
        if group.size is None and not group.ranks:
            # Which ranks belong together is not known: every participation stands alone.
            instance[members] = following + np.arange(len(members))
            following += len(members)
            continue
        if (parts.sequence[members] != NONE).all() and _sequences_are_unique(parts, members):
            _, number = np.unique(parts.sequence[members], return_inverse=True)
            instance[members] = following + number
            following += int(number.max()) + 1 if len(number) else 0
            continue
        for step in np.unique(parts.step[members]):
            chosen = members[parts.step[members] == step]
            number, text = _match_in_order(parts, chosen)
            instance[chosen] = np.where(number == NONE, NONE, following + number)
            following += int(number.max()) + 1 if len(number) else 0
            if text:
                mismatches.append(Mismatch(group.name, int(step), text))
    return instance, tuple(mismatches)


def _sequences_are_unique(parts: _Participations, members: Int64) -> bool:
    pairs = np.stack((parts.rank[members], parts.sequence[members]))
    return bool(np.unique(pairs, axis=1).shape[1] == len(members))


def _match_in_order(parts: _Participations, chosen: Int64) -> tuple[Int64, str]:
    """Number the collectives of one group in one step from 0; NONE for those left over, with a sentence about them."""
    what = np.stack((parts.kind[chosen], parts.dtype[chosen], parts.bytes[chosen]), axis=1)
    ranks, where = np.unique(parts.rank[chosen], return_inverse=True)
    per_rank = [np.flatnonzero(where == index) for index in range(len(ranks))]
    first = what[per_rank[0]]
    if all(len(rows) == len(first) and (what[rows] == first).all() for rows in per_rank[1:]):
        number = np.empty(len(chosen), dtype=np.int64)
        for rows in per_rank:
            number[rows] = np.arange(len(rows))
        return number, ""
    same_kinds = all(len(rows) == len(first) and (what[rows, 0] == first[:, 0]).all() for rows in per_rank[1:])
    if same_kinds and not _same_contents(what, per_rank):
        # Uneven sizes (all-to-all, ragged all-gather): kinds agree in order, and that is all that can be asked.
        number = np.empty(len(chosen), dtype=np.int64)
        for rows in per_rank:
            number[rows] = np.arange(len(rows))
        return number, ""
    return _match_equals(parts, what, per_rank, ranks)


def _same_contents(what: Int64, per_rank: list[Int64]) -> bool:
    """Do all ranks hold the same collectives, in any order?"""
    first = np.sort(what[per_rank[0]].view("i8,i8,i8").ravel())
    return all(np.array_equal(np.sort(what[rows].view("i8,i8,i8").ravel()), first) for rows in per_rank[1:])


def _match_equals(parts: _Participations, what: Int64, per_rank: list[Int64], ranks: Int64) -> tuple[Int64, str]:
    """Match the k-th of each (kind, type, size) on one rank with the k-th of the same on the others."""
    number = np.full(len(what), NONE, dtype=np.int64)
    seen: dict[tuple[int, ...], int] = {}
    counts: dict[tuple[int, ...], dict[int, int]] = {}
    for rank, rows in zip(ranks, per_rank, strict=True):
        occurrence: dict[tuple[int, ...], int] = {}
        for row in rows:
            key = tuple(int(value) for value in what[row])
            position = occurrence.get(key, 0)
            occurrence[key] = position + 1
            number[row] = seen.setdefault((*key, position), len(seen))
        for key, count in occurrence.items():
            counts.setdefault(key, {})[int(rank)] = count
    uneven = {key: count for key, count in counts.items() if len(set(count.values())) > 1 or len(count) < len(ranks)}
    if not uneven:
        return number, ""
    (kind, _, size), by_rank = next(iter(uneven.items()))
    numbers = ", ".join(f"rank {int(rank)}: {by_rank.get(int(rank), 0)}" for rank in ranks[:4])
    return number, f"{parts.kinds[kind]} of {size} bytes is not issued equally often ({numbers})"


def _shared(instance: Int64) -> Bool:
    """Which participations belong to an instance that at least two ranks take part in."""
    counts = np.bincount(instance[instance != NONE], minlength=1)
    return np.asarray((instance != NONE) & (counts[np.maximum(instance, 0)] > 1))


def _arrivals(parts: _Participations, instance: Int64, clocks: Clocks) -> Matched:
    kept = np.flatnonzero(instance != NONE)
    offset = clocks.offset_ns[np.searchsorted(clocks.ranks, parts.rank[kept])]
    start, end = parts.start_ns[kept] + offset, parts.end_ns[kept] + offset
    _, label = np.unique(instance[kept], return_inverse=True)
    count = int(label.max()) + 1 if len(label) else 0
    expected = np.array([len(group.ranks) or group.size or 0 for group in parts.groups] or [0], dtype=np.int64)
    group = _first_of(label, parts.group[kept], count)
    present = np.bincount(label, minlength=count).astype(np.int64)
    complete = present == expected[group] if count else np.empty(0, dtype=np.bool_)
    latest = np.full(count, np.iinfo(np.int64).min, dtype=np.int64)
    np.maximum.at(latest, label, start)
    shortest = np.full(count, np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(shortest, label, end - start)
    arrival = np.where(complete[label], latest[label], end - shortest[label]) if count else start
    arrival = np.clip(arrival, start, end)
    order = np.lexsort((-parts.rank[kept], start, label))
    last = np.full(count, NONE, dtype=np.int64)
    last[label[order]] = parts.rank[kept][order]
    # Renumber by the last arrival, so that causes are settled before what they caused.
    by_time = np.argsort(latest, kind="stable")
    position = np.empty(count, dtype=np.int64)
    position[by_time] = np.arange(count)
    lines = np.lexsort((parts.rank[kept], position[label]))
    instances = Instances(
        group=group[by_time],
        kind=_first_of(label, parts.kind[kept], count)[by_time],
        dtype=_first_of(label, parts.dtype[kept], count)[by_time],
        bytes=_largest_of(label, parts.bytes[kept], count)[by_time],
        step=_first_of(label, parts.step[kept], count)[by_time],
        participants=present[by_time],
        complete=complete[by_time],
        last_rank=np.where(complete & (present > 1), last, NONE)[by_time],
        last_arrival_ns=latest[by_time],
        groups=parts.groups,
        kinds=parts.kinds,
        dtypes=parts.dtypes,
    )
    return Matched(
        position[label][lines], parts.rank[kept][lines], parts.index[kept][lines], start[lines], end[lines],
        arrival[lines], instances, clocks,
    )  # fmt: skip


def _first_of(label: Int64, value: Int64, count: int) -> Int64:
    result = np.full(count, NONE, dtype=np.int64)
    result[label[::-1]] = value[::-1]
    return result


def _largest_of(label: Int64, value: Int64, count: int) -> Int64:
    result = np.full(count, NONE, dtype=np.int64)
    np.maximum.at(result, label, value)
    return result
