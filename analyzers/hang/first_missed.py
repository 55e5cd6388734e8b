"""The first operation that a missing rank did not join: the one that its peers issued next after its last.

Waiting ranks wait at several: those of its tensor-parallel group, of its data-parallel group, of its pipeline. Which
was next in the rank's own program is shown by a rank that runs the same one: it has groups of the same descriptions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perfscope.analyzers.hang.blocked import BlockedOp
from perfscope.analyzers.hang.progress import Progress
from perfscope.grouping import grouped


def first_missed(progress: Progress, blocked: Sequence[BlockedOp], ranks: frozenset[int]) -> BlockedOp | None:
    """The operation to name: the first missed by most of ``ranks``; of several the earliest. None: nobody waits."""
    firsts = [op for rank in sorted(ranks) if (op := _first_of(progress, blocked, rank)) is not None]
    return max(firsts, key=lambda op: (len(ranks & (op.missing | op.unknown)), -op.since_ns), default=None)


def _first_of(progress: Progress, blocked: Sequence[BlockedOp], rank: int) -> BlockedOp | None:
    awaited = [op for op in blocked if rank in op.missing | op.unknown or _holds_back(op, rank)]
    if not awaited:
        return None
    differing = [op for op in awaited if rank in op.waiting and op.variants]
    if differing:
        return min(differing, key=lambda op: op.waiting[rank].row)
    by_number = {(op.group.index, op.p2p, op.sequence): op for op in awaited}
    for peer in _peers(progress, awaited, rank):
        for key in _program(progress, peer, rank):
            if key in by_number:
                return by_number[key]
    return max(awaited, key=lambda op: (len(op.waiting), -op.since_ns))


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
