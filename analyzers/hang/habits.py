"""Ranks that left their own habit: they issued operations of several groups in another order than their peers.

A rank that skips a collective does not stand still. It goes on, by one number behind its peers in that group, until it
waits in another group for ranks that wait for it. Peers issue 64 of their tensor-parallel group before 4 of the world:
a rank that issued 4 after 63 skipped one, if it was in step with them before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

from perfscope.analyzers.hang.progress import Group, Progress
from perfscope.grouping import grouped

_AGREED: Final = 3
"""Operations in step with the peers, from which that is a habit."""
_PEERS: Final = 2
"""Other ranks that must agree with each other."""


_MOST: Final = 2
"""More that left theirs at once are on their way."""


class _Step(NamedTuple):
    """An operation by what is the same on ranks that run one program: not the group, but its role."""

    role: tuple[str, str, int, int]
    p2p: bool
    sequence: int


def departed(progress: Progress) -> frozenset[int]:
    """Ranks that alone, of all in a group, issued operations after others than before, where they did not earlier."""
    before = {rank: _before(progress, rank) for rank in progress.dumps}
    stages = {frozenset((sender, receiver)) for _, sender, receiver, _ in progress.p2p_rows}
    # Ranks that send to each other are of different stages of a pipeline, and run different programs.
    alike = [group for group in progress.groups if not any(pair <= set(group.ranks) for pair in stages)]
    found = {rank for group in alike if len(group.ranks) > _PEERS for rank in _departed_of(group, before)}
    return frozenset(found) if len(found) <= _MOST else frozenset()


def _before(progress: Progress, rank: int) -> dict[_Step, _Step]:
    """Each operation of a rank -> the last one before it of another group, or of the other kind."""
    dump, roles = progress.dumps[rank], _roles(progress, rank)
    found: dict[_Step, _Step] = {}
    last = other = None
    for index, p2p, sequence in zip(dump.group.tolist(), dump.p2p.tolist(), dump.sequence.tolist(), strict=True):
        step = _Step(roles[index], p2p, sequence)
        if last is not None and (last.role, last.p2p) != (step.role, step.p2p):
            other = last
        if other is not None:
            found.setdefault(step, other)
        last = step
    return found


def _roles(progress: Progress, rank: int) -> dict[int, tuple[str, str, int, int]]:
    """Index of a group in a rank's dump -> what it is for; of several for the same the place among them."""
    seen: Counter[tuple[str, str, int]] = Counter()
    roles = {}
    for index, number in progress.numbers[rank].items():
        group = progress.groups[number]
        role = (group.backend, group.description, len(group.ranks))
        roles[index] = (*role, seen[role])
        seen[role] += 1
    return roles


def _departed_of(group: Group, before: Mapping[int, Mapping[_Step, _Step]]) -> set[int]:
    """The members that were in step with the others, and then were not."""
    members = [rank for rank in group.ranks if before.get(rank)]
    issued = grouped((step, rank) for rank in members for step in before[rank])
    agreed: Counter[int] = Counter()
    odd: set[int] = set()
    for step, ranks in issued.items():
        values = grouped((before[rank][step], rank) for rank in ranks)
        most = max(values.values(), key=len)
        if len(most) < max(_PEERS, len(ranks) - 1):
            continue
        agreed.update(rank for rank in most if rank not in odd)
        odd |= {rank for rank in ranks if rank not in most and agreed[rank] >= _AGREED}
    return odd
