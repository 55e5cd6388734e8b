"""The first operation that a missing rank did not join: the one that its peers issued next after its last.

Waiting ranks wait at several: those of its tensor-parallel group, of its data-parallel group, of its pipeline. Which
was next in the rank's own program is shown by a rank that runs the same one: it has groups of the same descriptions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.hang.blocked import BlockedOp
from perfscope.analyzers.hang.progress import Progress
from perfscope.grouping import grouped

_ALIKE: Final = 3
"""Operations one after the other as before, from which the next is known."""


def first_missed(
    progress: Progress, blocked: Sequence[BlockedOp], ranks: frozenset[int], *, skipped: bool = False
) -> BlockedOp | None:
    """The operation to name: the first missed by most of ``ranks``; of several the earliest. None: nobody waits.

    ``skipped``: the ranks went on without it, so that what they issued last does not show what it was.
    """
    each = (_skipped_by(blocked, rank) if skipped else _first_of(progress, blocked, rank) for rank in sorted(ranks))
    firsts = [op for op in each if op is not None]
    return max(firsts, key=lambda op: (len(ranks & (op.missing | op.unknown)), -op.since_ns), default=None)


def _skipped_by(blocked: Sequence[BlockedOp], rank: int) -> BlockedOp | None:
    """What most other ranks wait at; before what all issued, where its device only holds the others back."""
    awaited = [op for op in blocked if _awaits(op, rank)]
    return max(awaited, key=lambda op: (rank in op.missing, len(op.waiting), -op.since_ns), default=None)


def _first_of(progress: Progress, blocked: Sequence[BlockedOp], rank: int) -> BlockedOp | None:
    incomplete = [op for op in blocked if op.missing or op.unknown or op.undecided]
    awaited = [op for op in incomplete or blocked if _awaits(op, rank)]
    if not awaited:
        return None
    differing = [op for op in awaited if rank in op.waiting and op.variants]
    if differing:
        return min(differing, key=lambda op: op.waiting[rank].row)
    streams = {(op.group.index, op.p2p): op for op in sorted(awaited, key=lambda op: -op.sequence)}
    for stream in _expected(progress, rank):
        if stream in streams:
            return streams[stream]
    by_number = {(op.group.index, op.p2p, op.sequence): op for op in awaited}
    for peer in _peers(progress, awaited, rank):
        for key in _program(progress, peer, rank):
            if key in by_number:
                return by_number[key]
    return max(awaited, key=lambda op: (len(op.waiting), -op.since_ns))


def _awaits(op: BlockedOp, rank: int) -> bool:
    return rank in op.missing | op.unknown or _holds_back(op, rank)


def _expected(progress: Progress, rank: int) -> list[tuple[int, bool]]:
    """(group, send or recv) of what a rank issued after what it issued last, when it had done the same before.

    Empty where that is not clear: nothing that its dump holds was like its end.
    """
    dump = progress.dumps.get(rank)
    if dump is None or not len(dump.group):
        return []
    _, steps = np.unique(np.stack([dump.group, dump.kind], axis=1), axis=0, return_inverse=True)
    steps = steps.ravel()
    ends = np.flatnonzero(steps[:-1] == steps[-1])
    length = 1
    while len(ends) > 1 and length < len(steps):
        longer = ends[ends >= length]
        longer = longer[steps[longer - length] == steps[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if length < _ALIKE:
        return []
    numbers = progress.numbers[rank]
    after = range(int(ends[-1]) + 1, len(steps))
    return [(numbers[int(dump.group[row])], bool(dump.p2p[row])) for row in after]


def _holds_back(op: BlockedOp, rank: int) -> bool:
    return rank in op.waiting and not op.missing and not op.unknown


def _peers(progress: Progress, awaited: Sequence[BlockedOp], rank: int) -> list[int]:
    """Ranks that wait for ``rank`` in a collective and have groups of the same kinds: they run the same program."""
    own = _kinds_of_groups(progress, rank)
    waiting = {peer for op in awaited if not op.p2p for peer in op.waiting if peer != rank}
    return sorted(peer for peer in waiting if _kinds_of_groups(progress, peer).keys() >= own.keys())


def _kinds_of_groups(progress: Progress, rank: int) -> dict[tuple[str, str, int], list[int]]:
    return grouped(
        ((group.backend, group.description, len(group.ranks)), group.index)
        for group in progress.groups
        if rank in group.ranks
    )


def _program(progress: Progress, peer: int, rank: int) -> Iterator[tuple[int, bool, int]]:
    """What ``peer`` issued, in its order, as (group, send or recv, number) of the same group of ``rank``."""
    own, theirs = _kinds_of_groups(progress, rank), _kinds_of_groups(progress, peer)
    same = {
        group: group if group in own[kind] else own[kind][place]
        for kind, groups in theirs.items()
        for place, group in enumerate(groups)
        if group in own.get(kind, ()) or place < len(own.get(kind, ()))
    }
    dump, numbers = progress.dumps[peer], progress.numbers[peer]
    for index, p2p, sequence in zip(dump.group.tolist(), dump.p2p.tolist(), dump.sequence.tolist(), strict=True):
        if numbers[index] in same:
            yield same[numbers[index]], p2p, sequence
