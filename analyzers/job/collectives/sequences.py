"""Collectives of all ranks matched: by sequence number, else by the order in which each rank issued them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.job.blocks import Blocks
from perfscope.analyzers.job.collectives.unmatched import Mismatch, UnmatchedOps, by_value, called
from perfscope.frozen import dataclass
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Bool, Int64

_COMPARABLE: Final = 0.5
"""Share of a group's collectives that must find a partner by their numbers for these to mean the same on all ranks."""

UNEVEN: Final = ("all_to_all", "all_gather", "reduce_scatter", "gather", "scatter", "unknown", "send_recv")
"""Kinds in which each rank may contribute a different number of bytes; in any other kind that is an error."""

_Token = tuple[int, int, int]
"""Kind, type, bytes."""


@dataclass(frozen=True, eq=False)
class NumberedOps:
    """``instance`` of each row: rows of one collective share a number, from 0; NONE where it cannot be matched."""

    instance: Int64
    mismatches: tuple[Mismatch, ...] = ()


def number_collectives(ops: UnmatchedOps, rows: Int64) -> NumberedOps:
    """Match the rank ops at ``rows``, which are of kinds that all ranks of a group take part in.

    By recorded sequence numbers where every rank of a group has them; else by order of occurrence within the step,
    checked by kind, type and size.
    """
    known = ops.expected[ops.group[rows]] > 0
    by_number = known & _numbers_are_comparable(ops, rows)
    instance = np.full(len(rows), NONE, dtype=np.int64)
    # Without known groups every rank op is an instance of its own.
    following = int((~known).sum())
    instance[~known] = np.arange(following)
    mismatches: list[Mismatch] = []
    for chosen, number in ((by_number, _by_number), (known & ~by_number, _by_order)):
        numbered = number(ops, rows[chosen])
        instance[chosen] = np.where(numbered.instance == NONE, NONE, numbered.instance + following)
        following += int(numbered.instance.max(initial=NONE)) + 1
        mismatches += numbered.mismatches
    return NumberedOps(instance, tuple(sorted(mismatches, key=lambda each: (each.step, each.group))))


def _numbers_are_comparable(ops: UnmatchedOps, rows: Int64) -> Bool:
    """For each row: can its group be matched by number?

    Every rank must have recorded them, and they must count the same things: NCCL's also count batches of sends and
    recvs, of which ranks issue different numbers (torch's ProcessGroupNCCL::startCoalescing).
    """
    group, groups = ops.group[rows], len(ops.groups)
    silent = np.bincount(group, weights=ops.sequence[rows] == NONE, minlength=groups) > 0
    mixed = np.isin(np.arange(groups), ops.group[ops.one_way & ~ops.on_host])
    blocks = Blocks.of(group, ops.sequence[rows])
    pairs = (blocks.size > 1)[blocks.labels()]
    owners = Blocks.of(group, ops.rank[rows])
    several = np.bincount(group[owners.order[owners.first]], minlength=groups) > 1
    paired = np.bincount(group, weights=pairs, minlength=groups) >= _COMPARABLE * np.bincount(group, minlength=groups)
    return (~silent & ~mixed & (paired | ~several))[group]


def _by_number(ops: UnmatchedOps, rows: Int64) -> NumberedOps:
    # A collective that takes several kernels has one number for all of them.
    again = Blocks.of(ops.group[rows], ops.sequence[rows], ops.rank[rows]).positions()
    blocks = Blocks.of(ops.group[rows], ops.sequence[rows], again)
    instance = blocks.labels()
    return NumberedOps(instance, (*_contradictions(ops, rows, blocks, instance), *_gaps(ops, rows, blocks)))


def _contradictions(ops: UnmatchedOps, rows: Int64, blocks: Blocks, instance: Int64) -> Iterator[Mismatch]:
    """Rank ops of one number but of different kinds or sizes: separated (in ``instance``) and reported."""
    ordered = rows[blocks.order]
    model = ordered[blocks.first[blocks.label]]
    unlike = distinct(blocks.label[~_alike(ops, ordered, model, sizes_may_differ=True)])
    following = len(blocks)
    for label in unlike.tolist():
        own = blocks.rows(label)
        instance[own] = following + np.arange(len(own))
        following += len(own)
        values = {
            int(ops.rank[row]): called(ops.kinds[ops.kind[row]], int(ops.bytes[row])) for row in rows[own].tolist()
        }
        text, ranks = by_value(values)
        row = rows[own[0]]
        yield ops.mismatch(row, f"number {ops.sequence[row]} is not the same collective on all ranks ({text})", ranks)


def _gaps(ops: UnmatchedOps, rows: Int64, blocks: Blocks) -> Iterator[Mismatch]:
    """Numbers that a rank lacks between two that it has, one sentence for each group and step.

    Numbers before a rank's first or after its last one were issued outside its recording.
    """
    present = _present(ops)
    lacking = np.flatnonzero(blocks.size < present[ops.group[rows[blocks.order[blocks.first]]]])
    if len(lacking) == 0:
        return
    spans = Blocks.of(ops.group[rows], ops.rank[rows])
    numbers = ops.sequence[rows][spans.order]
    low, high = np.minimum.reduceat(numbers, spans.first), np.maximum.reduceat(numbers, spans.first)
    owner = rows[spans.order[spans.first]]
    missing: dict[tuple[int, int], dict[int, int]] = {}
    example: dict[tuple[int, int], int] = {}
    for label in lacking.tolist():
        own = rows[blocks.rows(label)]
        group, sequence = ops.group[own[0]], ops.sequence[own[0]]
        around = (ops.group[owner] == group) & (low < sequence) & (sequence < high)
        key = (int(group), int(ops.step[own[0]]))
        for rank in np.setdiff1d(ops.rank[owner[around]], ops.rank[own]).tolist():
            missing.setdefault(key, {})[rank] = missing.get(key, {}).get(rank, 0) + 1
            example.setdefault(key, int(own[0]))
    for key, count in sorted(missing.items()):
        text, _ = by_value({rank: f"{lacks} missing" for rank, lacks in count.items()})
        row = example[key]
        what = called(ops.kinds[ops.kind[row]], int(ops.bytes[row]))
        yield ops.mismatch(
            row,
            f"some ranks lack collectives that the others issued ({text}), the first of them {what}",
            tuple(sorted(count)),
        )


def _by_order(ops: UnmatchedOps, rows: Int64) -> NumberedOps:
    blocks = Blocks.of(ops.group[rows], ops.step[rows])
    ordered = rows[blocks.order]
    runs = Blocks.of(blocks.label, ops.rank[ordered])  # already in this order: rows come rank by rank
    position, owner = runs.position, blocks.label[runs.first]
    first_run = np.searchsorted(owner, np.arange(len(blocks)))
    length = runs.size[first_run]
    place = np.minimum(position, length[blocks.label] - 1)
    model = ordered[blocks.first[blocks.label] + place]
    fits = _alike(ops, ordered, model, sizes_may_differ=False) & (runs.size[runs.label] == length[blocks.label])
    good = np.bincount(blocks.label, weights=~fits, minlength=len(blocks)) == 0
    longest = np.maximum.reduceat(runs.size, first_run) if len(blocks) else length
    # Numbers are reserved for all rows of all runs, in case none can be matched.
    room = np.where(good, longest, blocks.size)
    base = np.cumsum(room) - room
    number = np.where(good[blocks.label], base[blocks.label] + position, NONE)
    mismatches = list(_absent(ops, ordered, blocks, owner))
    for label in np.flatnonzero(~good).tolist():
        own = slice(blocks.first[label], blocks.first[label] + blocks.size[label])
        members = ordered[own]
        ranks, begins = np.unique(ops.rank[members], return_index=True)
        pieces = np.split(np.arange(len(members)), begins[1:])
        what = np.stack((ops.kind[members], ops.dtype[members], ops.bytes[members]), axis=1)
        resolved = resolve(what, dict(zip(ranks.tolist(), pieces, strict=True)), ops.kinds)
        number[own] = np.where(resolved.number == NONE, NONE, resolved.number + base[label])
        if resolved.text:
            mismatches.append(ops.mismatch(members[0], resolved.text, resolved.ranks))
    instance = np.full(len(rows), NONE, dtype=np.int64)
    instance[blocks.order] = number
    return NumberedOps(instance, tuple(mismatches))


def _alike(ops: UnmatchedOps, rows: Int64, models: Int64, *, sizes_may_differ: bool) -> Bool:
    """Are two rank ops alike, as far as both are recorded? Sizes may differ only of kinds that allow it."""
    unknown = ops.is_kind(("unknown",))
    same = (ops.kind[rows] == ops.kind[models]) | unknown[rows] | unknown[models]
    for column in (ops.dtype, ops.bytes):
        one, other = column[rows], column[models]
        agree = (one == other) | (one == NONE) | (other == NONE)
        if sizes_may_differ:
            agree |= ops.is_kind(UNEVEN)[rows]
        same &= agree
    return np.asarray(same)


def _present(ops: UnmatchedOps) -> Int64:
    """For each group, how many of its ranks are recorded; where they are not listed, how many took part."""
    recorded = set(ops.recorded)
    seen = Blocks.of(ops.group, ops.rank)
    counts = np.bincount(ops.group[seen.order[seen.first]], minlength=len(ops.groups))
    listed = [len(recorded.intersection(group.ranks)) for group in ops.groups]
    return np.maximum(counts, np.array(listed or [0], dtype=np.int64))


def _absent(ops: UnmatchedOps, ordered: Int64, blocks: Blocks, owner: Int64) -> Iterator[Mismatch]:
    """Ranks of a group that issued nothing in a step in which the others did."""
    if len(blocks) == 0:
        return
    group = ops.group[ordered[blocks.first]]
    short = np.flatnonzero(np.bincount(owner, minlength=len(blocks)) < _present(ops)[group])
    for label in short.tolist():
        rows = ordered[blocks.first[label] : blocks.first[label] + blocks.size[label]]
        issued = set(ops.rank[rows].tolist())
        members = ops.groups[group[label]].ranks or ops.rank[ops.group == group[label]].tolist()
        ranks = tuple(sorted({rank for rank in members if rank in ops.recorded} - issued))
        counts, _ = by_value(dict.fromkeys(ranks, "none") | dict.fromkeys(issued, "some"))
        yield ops.mismatch(rows[0], f"not all ranks issued a collective ({counts})", ranks)


@dataclass(frozen=True)
class ResolvedOrder:
    """``number`` of each row within the step, from 0; NONE for those that do not match, which ``text`` and ``ranks``
    describe (empty: all match).
    """

    number: Int64
    text: str = ""
    ranks: tuple[int, ...] = ()


def resolve(what: Int64, runs: Mapping[int, Int64], kinds: Sequence[str]) -> ResolvedOrder:
    """Match the rows of one group and step. ``what`` is [row, (kind, type, bytes)]; ``runs`` are each rank's rows.

    Where all ranks hold the same collectives in different orders (two threads of a backend start a pair in either
    order), equal ones match in order. Where only sizes differ, in kinds that allow it, the order alone counts. Else the
    sequences are compared like two texts, line by line.
    """
    contents = [np.sort(np.ascontiguousarray(what[rows]).view("i8,i8,i8").ravel()) for rows in runs.values()]
    if all(np.array_equal(each, contents[0]) for each in contents):
        return ResolvedOrder(_equals_in_order(what, runs))
    lengths = {len(rows) for rows in runs.values()}
    if len(lengths) == 1:
        stacked = what[np.stack(list(runs.values()))]
        if _agree(stacked[:, :, 0], np.array([kind == "unknown" for kind in kinds])):
            return _in_order(stacked, runs, kinds, len(what))
    return _side_by_side(what, runs, kinds)


def _agree(kinds: Int64, is_unknown: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> bool:
    """Is the k-th of the same kind on all ranks, as far as it is known? ``kinds`` is [rank, k]."""
    unknown = is_unknown[kinds]
    low = np.where(unknown, np.iinfo(np.int64).max, kinds).min(axis=0)
    high = np.where(unknown, -1, kinds).max(axis=0)
    return bool(((low == high) | (high == -1)).all())


def _equals_in_order(what: Int64, runs: Mapping[int, Int64]) -> Int64:
    number = np.full(len(what), NONE, dtype=np.int64)
    seen: dict[tuple[_Token, int], int] = {}
    for rows in runs.values():
        occurrence: Counter[_Token] = Counter()
        for row, token in zip(rows.tolist(), _tokens(what, rows), strict=True):
            number[row] = seen.setdefault((token, occurrence[token]), len(seen))
            occurrence[token] += 1
    return number


def _in_order(stacked: Int64, runs: Mapping[int, Int64], kinds: Sequence[str], rows: int) -> ResolvedOrder:
    """The k-th with the k-th, but for those whose sizes contradict each other. ``stacked`` is [rank, k, what]."""
    number = np.full(rows, NONE, dtype=np.int64)
    count = stacked.shape[1]
    even = np.array([kind not in UNEVEN for kind in kinds])[stacked[:, :, 0]].any(axis=0)
    size = stacked[:, :, 2]
    known = size != NONE
    low, high = np.where(known, size, np.iinfo(np.int64).max).min(axis=0), size.max(axis=0)
    wrong = even & (high != NONE) & (low != high)
    for own in runs.values():
        number[own] = np.where(wrong, NONE, np.arange(count))
    if not wrong.any():
        return ResolvedOrder(number)
    place = int(np.argmax(wrong))
    text, ranks = by_value(
        {rank: f"{length} bytes" for rank, length in zip(runs, size[:, place].tolist(), strict=True)}
    )
    more = f", and {int(wrong.sum()) - 1} more" if wrong.sum() > 1 else ""
    return ResolvedOrder(number, f"{kinds[stacked[0, place, 0]]} {place + 1} has different sizes ({text}){more}", ranks)


def _side_by_side(what: Int64, runs: Mapping[int, Int64], kinds: Sequence[str]) -> ResolvedOrder:
    number = np.full(len(what), NONE, dtype=np.int64)
    sequences = {rank: _tokens(what, rows) for rank, rows in runs.items()}
    # The others are compared with the sequence that most ranks have; of equally common ones, the longest.
    common = Counter(tuple(sequence) for sequence in sequences.values())
    model = max(common, key=lambda sequence: (common[sequence], len(sequence)))
    alike: dict[tuple[_Token, ...], list[int]] = {}
    extra: dict[tuple[_Token, int], int] = {}
    for rank, rows in runs.items():
        sequence = tuple(sequences[rank])
        if sequence not in alike:
            alike[sequence] = _places(model, sequence, extra)
        number[rows] = alike[sequence]
    return ResolvedOrder(number, *_uneven(sequences, kinds))


def _places(model: Sequence[_Token], sequence: Sequence[_Token], extra: dict[tuple[_Token, int], int]) -> list[int]:
    """For each op of a sequence, its place in the model; ops that it lacks are numbered after it in ``extra``."""
    from difflib import SequenceMatcher

    places = [NONE] * len(sequence)
    free: dict[_Token, list[int]] = defaultdict(list)
    taken = set()
    for block in SequenceMatcher(None, model, sequence, autojunk=False).get_matching_blocks():
        for step in range(block.size):
            places[block.b + step] = block.a + step
            taken.add(block.a + step)
    for place, token in enumerate(model):
        if place not in taken:
            free[token].append(place)
    left: Counter[_Token] = Counter()
    for index, token in enumerate(sequence):
        if places[index] != NONE:
            continue
        if free[token]:
            places[index] = free[token].pop(0)
        else:
            places[index] = extra.setdefault((token, left[token]), len(model) + len(extra))
            left[token] += 1
    return places


def _uneven(sequences: Mapping[int, Sequence[_Token]], kinds: Sequence[str]) -> tuple[str, tuple[int, ...]]:
    """What the ranks do not issue equally often: the first such in words, and all ranks concerned."""
    counts = {rank: Counter(sequence) for rank, sequence in sequences.items()}
    every = {token for count in counts.values() for token in count}
    uneven = [token for token in sorted(every) if len({count[token] for count in counts.values()}) > 1]
    described = [by_value({rank: count[token] for rank, count in counts.items()}) for token in uneven]
    kind, _, size = uneven[0]
    more = f", and {len(uneven) - 1} more" if len(uneven) > 1 else ""
    text = f"{called(kinds[kind], size)} is not issued equally often ({described[0][0]}){more}"
    return text, tuple(sorted({rank for _, ranks in described for rank in ranks}))


def _tokens(what: Int64, rows: Int64) -> list[_Token]:
    return [(kind, dtype, size) for kind, dtype, size in what[rows].tolist()]
