"""The operations at which ranks wait: who came, who did not, and who issued something else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Final

import numpy as np

from perfscope.analyzers.hang.progress import Group, OpenOp, Progress, job_groups, op_of
from perfscope.analyzers.readers.flight import OpKind
from perfscope.frozen import dataclass
from perfscope.grouping import grouped

_ONE_SIZE: Final = frozenset(
    {"all_reduce", "allreduce", "broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "_all_gather_base"}
    | {"_allgather_base", "_reduce_scatter_base", "all_gather_into_tensor", "reduce_scatter_tensor"}
    | {"all_gather_single", "reduce_scatter_single", "allreduce_coalesced"}
    | {"all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"}
)
"""Every rank must bring as many elements; of the others sizes may differ."""

_HABIT: Final = 2
"""Collectives of one size on all ranks, from which that is a habit."""


@dataclass
class BlockedOp:
    """One collective, or one send with its recv, that is not done."""

    group: Group
    p2p: bool
    sequence: int
    waiting: dict[int, OpenOp]
    """Rank -> its part, of those that issued it."""
    missing: set[int] = field(default_factory=set)
    """Ranks that did not issue it, or issued something else instead (``variants``)."""
    unknown: set[int] = field(default_factory=set)
    """Ranks of which nothing is known: no dump, or one without entries."""
    variants: dict[str, list[int]] = field(default_factory=dict)
    """What was issued under this number -> ranks; empty where all issued the same."""
    passed: dict[int, OpenOp] = field(default_factory=dict)
    """Rank -> its part, of those on which it is done though another one, that issued something else, still waits."""
    undecided: bool = False
    """The ranks differ, and neither side is the odd one."""

    @property
    def since_ns(self) -> int:
        """When the first of the waiting ranks issued it."""
        return min(op.created_ns for op in self.waiting.values())

    @property
    def parts(self) -> dict[int, OpenOp]:
        """Those of all that issued it."""
        return {**self.waiting, **self.passed}

    @property
    def kind(self) -> OpKind:
        """What most of the waiting ranks issued."""
        kinds = Counter(op.kind for rank, op in self.parts.items() if rank not in self.missing)
        return kinds.most_common(1)[0][0] if kinds else next(iter(self.waiting.values())).kind


def blocked_ops(progress: Progress) -> list[BlockedOp]:
    """Every operation that some rank waits for, in no order."""
    together = grouped(((op.group, op.sequence), op) for ops in progress.open_ops.values() for op in ops if not op.p2p)
    collectives = [found for key, ops in together.items() if (found := _collective(progress, *key, ops)) is not None]
    _set_variants(progress, collectives)
    unlike = list(_done_elsewhere(progress))
    _set_variants(progress, unlike)
    return [*(op for op in unlike if op.waiting.keys() <= op.missing), *collectives, *_messages(progress)]


def _done_elsewhere(progress: Progress) -> Iterator[BlockedOp]:
    """The first collective of each rank that is done on others only: gloo ends it there even if sizes are unlike."""
    firsts = grouped(((ops[0].group, ops[0].sequence), ops[0]) for ops in progress.behind.values() if ops)
    for (number, sequence), ops in firsts.items():
        group = progress.groups[number]
        made = BlockedOp(group, False, sequence, {op.rank: op for op in ops})
        for rank in group.ranks:
            dump = progress.dumps.get(rank)
            if dump is None or rank in made.waiting:
                continue
            rows = np.flatnonzero((job_groups(dump, progress.numbers[rank]) == number) & ~dump.p2p)
            for row in rows[dump.sequence[rows] == sequence].tolist():
                made.passed[rank] = op_of(rank, dump, row, group, progress.offsets_ns.get(rank, 0))
        yield made


def _collective(progress: Progress, group: int, sequence: int, ops: list[OpenOp]) -> BlockedOp | None:
    """None where a rank that came has no part that is open: it is done there, so all have come."""
    waiting = {op.rank: op for op in reversed(ops)}
    made = BlockedOp(progress.groups[group], False, sequence, waiting)
    for rank in made.group.ranks:
        if rank in waiting:
            continue
        came = progress.has_come(rank, group, sequence)
        if came:
            return None
        (made.unknown if came is None else made.missing).add(rank)
    return made


def _set_variants(progress: Progress, collectives: list[BlockedOp]) -> None:
    """Compare what the ranks issued. Of ranks that differ the fewer are the odd ones; where there are as many, what
    groups of the same kind issued under the same number decides.
    """
    for blocked in collectives:
        shown = _shown
        parts = sorted(blocked.parts.items())
        by_variant = grouped((shown(op.kind), rank) for rank, op in parts)
        if len(by_variant) < 2:
            shown = _sized
            by_variant = grouped((shown(op.kind), rank) for rank, op in parts)
            if len(by_variant) < 2 or not _sizes_are_alike(progress, blocked):
                continue
        blocked.variants = by_variant
        most = max(map(len, by_variant.values()))
        first = [text for text, ranks in by_variant.items() if len(ranks) == most]
        if len(first) > 1:
            votes = _issued_in_groups_alike(progress, blocked, shown)
            most = max(votes[text] for text in first)
            first = [text for text in first if votes[text] == most]
        if len(first) > 1:
            blocked.undecided = True
        else:
            blocked.missing |= {rank for text, ranks in by_variant.items() if text != first[0] for rank in ranks}


def _sizes_are_alike(progress: Progress, blocked: BlockedOp) -> bool:
    """Did all ranks issue this operator with the same sizes before, where that need not be?"""
    seen: dict[int, set[str]] = {}
    for rank in blocked.waiting:
        dump, number = progress.dumps[rank], blocked.group.index
        texts = [_sized(kind) if kind.operator == blocked.kind.operator else "" for kind in dump.kinds]
        own = np.array([progress.numbers[rank][index] == number for index in range(len(dump.groups))], dtype=np.bool_)
        for row in np.flatnonzero(own[dump.group] & ~dump.p2p & (dump.sequence != blocked.sequence)).tolist():
            if texts[dump.kind[row]]:
                seen.setdefault(int(dump.sequence[row]), set()).add(texts[dump.kind[row]])
    return len(seen) >= _HABIT and all(len(texts) == 1 for texts in seen.values())


def _issued_in_groups_alike(progress: Progress, blocked: BlockedOp, shown: Callable[[OpKind], str]) -> Counter[str]:
    """What ranks of other groups of the same description and size issued under the same number."""
    votes: Counter[str] = Counter()
    alike = {group.index for group in progress.groups if _role(group) == _role(blocked.group)} - {blocked.group.index}
    for rank, dump in progress.dumps.items():
        for index, number in progress.numbers[rank].items():
            if number in alike:
                rows = (dump.group == index) & ~dump.p2p & (dump.sequence == blocked.sequence)
                votes.update(shown(dump.kinds[kind]) for kind in dump.kind[rows].tolist())
    return votes


def _role(group: Group) -> tuple[str, str, int]:
    return group.backend, group.description, len(group.ranks)


def _shown(kind: OpKind) -> str:
    """What must be the same on all ranks: the operator, the type, and the number of elements where that must be."""
    if kind.operator in _ONE_SIZE:
        return _sized(kind)
    return kind.operator


def _sized(kind: OpKind) -> str:
    """Operator, number of elements in and out, and type."""
    types = "/".join(dict.fromkeys(kind.dtypes))
    if not kind.input_sizes:
        return f"{kind.operator} {types}".rstrip()
    counts = (sum(math.prod(dims) for dims in sizes) for sizes in (kind.input_sizes, kind.output_sizes))
    return (
        f"{kind.operator} of {' -> '.join(f'{count:,}' for count in dict.fromkeys(counts))} elements {types}".rstrip()
    )


def _messages(progress: Progress) -> Iterator[BlockedOp]:
    """Sends without a recv, and recvs without a send."""
    common = {group.index: _numbers_are_common(progress, group) for group in progress.groups}
    pairs = grouped(((op.group, *_pair(op)), op) for ops in progress.open_ops.values() for op in ops if _is_message(op))
    for (group, sender, receiver), ops in pairs.items():
        sends = [op for op in ops if op.kind.operator == "send"]
        recvs = [op for op in ops if op.kind.operator == "recv"]
        matched = _by_number if common[group] else _by_order
        yield from matched(progress, group, (sender, receiver), sends, recvs)


def _is_message(op: OpenOp) -> bool:
    return op.p2p and op.peer is not None and op.peer != op.rank and op.kind.operator in ("send", "recv")


def _pair(op: OpenOp) -> tuple[int, int]:
    peer = op.peer if op.peer is not None else op.rank
    return (op.rank, peer) if op.kind.operator == "send" else (peer, op.rank)


def _numbers_are_common(progress: Progress, group: Group) -> bool:
    """Do the two sides of a message count it by one number? In a group of two they do; in others they may."""
    if len(group.ranks) == 2:
        return True
    same = different = 0
    for (index, sender, receiver, side), rows in progress.p2p_rows.items():
        others = progress.p2p_rows.get((group.index, sender, receiver, "recv"))
        if index != group.index or side != "send" or not others:
            continue
        mine, theirs = {row[0] for row in rows}, {row[0] for row in others}
        first, last = max(min(mine), min(theirs)), min(max(mine), max(theirs))
        if first <= last:
            within = {number for number in mine | theirs if first <= number <= last}
            same, different = same + len(within & mine & theirs), different + len(within - (mine & theirs))
    return same > 0 and different * 10 <= same


def _by_number(
    progress: Progress, group: int, pair: tuple[int, int], sends: list[OpenOp], recvs: list[OpenOp]
) -> Iterator[BlockedOp]:
    parts = grouped((op.sequence, op) for op in (*sends, *recvs))
    for sequence, ops in parts.items():
        made = BlockedOp(progress.groups[group], True, sequence, {op.rank: op for op in reversed(ops)})
        absent = [rank for rank in pair if rank not in made.waiting]
        for rank in absent:
            other = progress.p2p_rows.get((group, *pair, "send" if rank == pair[0] else "recv"), [])
            if any(number >= sequence for number, _, _ in other):
                break  # done there: it was issued before what came after it
            if not other and progress.p2p_status.get((group, rank), -1) >= sequence:
                break
            (made.missing if _knows(progress, rank) else made.unknown).add(rank)
        else:
            yield made


def _by_order(
    progress: Progress, group: int, pair: tuple[int, int], sends: list[OpenOp], recvs: list[OpenOp]
) -> Iterator[BlockedOp]:
    """The first open send belongs to the first open recv, and so on: what is left over has no counterpart.

    A send that is done may have left its message in a buffer: as many recvs as there are such sends since the last recv
    that is done wait for nobody, but that is not visible, since the buffers of both ranks may begin anywhere.
    """
    for place in range(max(len(sends), len(recvs))):
        ops = [side[place] for side in (sends, recvs) if place < len(side)]
        made = BlockedOp(progress.groups[group], True, ops[0].sequence, {op.rank: op for op in ops})
        for rank in set(pair) - made.waiting.keys():
            (made.missing if _knows(progress, rank) else made.unknown).add(rank)
        yield made


def _knows(progress: Progress, rank: int) -> bool:
    dump = progress.dumps.get(rank)
    return dump is not None and (len(dump.group) > 0 or progress.only_active)


def timed_out(blocked: BlockedOp) -> bool:
    """Did a watchdog give up on it?"""
    return any(op.timed_out for op in blocked.waiting.values())
