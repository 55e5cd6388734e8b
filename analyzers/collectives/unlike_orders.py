"""Collectives of one group in one step where the ranks' sequences differ: what still pairs up, and what does not."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Final

import numpy as np

from perfscope.analyzers.collectives.mismatches import by_value, called
from perfscope.trace import NONE, Int64

UNEVEN: Final = ("all_to_all", "all_gather", "reduce_scatter", "gather", "scatter", "unknown", "send_recv")
"""Kinds to which each rank may bring another number of bytes; of any other kind that would be an error."""

_Token = tuple[int, int, int]
"""Kind, type, bytes."""


@dataclass(frozen=True)
class Resolved:
    """``number`` of each row within the step, from 0, NONE for those left over; ``text`` and ``ranks`` say of them what
    and whose they are (empty: none left over).
    """

    number: Int64
    text: str = ""
    ranks: tuple[int, ...] = ()


def resolve(what: Int64, runs: Mapping[int, Int64], kinds: Sequence[str]) -> Resolved:
    """Pair up the rows of one group and step. ``what`` is [row, (kind, type, bytes)]; ``runs`` are each rank's rows.

    Where all ranks hold the same collectives in unlike order (two threads of a backend start a pair in either order),
    equals are paired in order. Where only sizes differ, of kinds in which they may, the order alone counts. Else the
    sequences are laid side by side as text is compared, line by line.
    """
    if _hold_the_same(what, runs):
        return Resolved(_equals_in_order(what, runs))
    lengths = {len(rows) for rows in runs.values()}
    if len(lengths) == 1:
        stacked = what[np.stack(list(runs.values()))]
        if _agree(stacked[:, :, 0], np.array([kind == "unknown" for kind in kinds])):
            return _in_order(stacked, runs, kinds, len(what))
    return _side_by_side(what, runs, kinds)


def _hold_the_same(what: Int64, runs: Mapping[int, Int64]) -> bool:
    contents = [np.sort(np.ascontiguousarray(what[rows]).view("i8,i8,i8").ravel()) for rows in runs.values()]
    return all(np.array_equal(each, contents[0]) for each in contents[1:])


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


def _in_order(stacked: Int64, runs: Mapping[int, Int64], kinds: Sequence[str], rows: int) -> Resolved:
    """The k-th with the k-th; those whose sizes contradict each other are left over. ``stacked`` is [rank, k, what]."""
    number = np.full(rows, NONE, dtype=np.int64)
    count = stacked.shape[1]
    even = np.array([kind not in UNEVEN for kind in kinds])[stacked[:, :, 0]].any(axis=0)
    size = stacked[:, :, 2]
    told = size != NONE
    low, high = np.where(told, size, np.iinfo(np.int64).max).min(axis=0), size.max(axis=0)
    wrong = even & (high != NONE) & (low != high)
    for own in runs.values():
        number[own] = np.where(wrong, NONE, np.arange(count))
    if not wrong.any():
        return Resolved(number)
    place = int(np.argmax(wrong))
    text, ranks = by_value(
        {rank: f"{length} bytes" for rank, length in zip(runs, size[:, place].tolist(), strict=True)}
    )
    more = f", and {int(wrong.sum()) - 1} more" if wrong.sum() > 1 else ""
    return Resolved(number, f"{kinds[stacked[0, place, 0]]} {place + 1} has different sizes ({text}){more}", ranks)


def _side_by_side(what: Int64, runs: Mapping[int, Int64], kinds: Sequence[str]) -> Resolved:
    number = np.full(len(what), NONE, dtype=np.int64)
    sequences = {rank: _tokens(what, rows) for rank, rows in runs.items()}
    # Most ranks' sequence is what the others are compared with; of equally common ones the longest.
    common = Counter(tuple(sequence) for sequence in sequences.values())
    model = max(common, key=lambda sequence: (common[sequence], len(sequence)))
    alike: dict[tuple[_Token, ...], list[int]] = {}
    extra: dict[tuple[_Token, int], int] = {}
    for rank, rows in runs.items():
        sequence = tuple(sequences[rank])
        if sequence not in alike:
            alike[sequence] = _places(model, sequence, extra)
        number[rows] = alike[sequence]
    return Resolved(number, *_told(sequences, kinds))


def _places(model: Sequence[_Token], sequence: Sequence[_Token], extra: dict[tuple[_Token, int], int]) -> list[int]:
    """For each of a sequence, its place in the model; what the model lacks is numbered on in ``extra``."""
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


def _told(sequences: Mapping[int, Sequence[_Token]], kinds: Sequence[str]) -> tuple[str, tuple[int, ...]]:
    """What is not issued equally often: the first such in words, and all ranks concerned."""
    counts = {rank: Counter(sequence) for rank, sequence in sequences.items()}
    every = {token for count in counts.values() for token in count}
    uneven = [token for token in sorted(every) if len({count[token] for count in counts.values()}) > 1]
    told = [by_value({rank: count[token] for rank, count in counts.items()}) for token in uneven]
    kind, _, size = uneven[0]
    more = f", and {len(uneven) - 1} more" if len(uneven) > 1 else ""
    text = f"{called(kinds[kind], size)} is not issued equally often ({told[0][0]}){more}"
    return text, tuple(sorted({rank for _, ranks in told for rank in ranks}))


def _tokens(what: Int64, rows: Int64) -> list[_Token]:
    return [(kind, dtype, size) for kind, dtype, size in what[rows].tolist()]
