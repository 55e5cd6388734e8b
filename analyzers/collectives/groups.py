"""Process groups across ranks: which of the ranks' own groups are the same, and what to call them.

A rank knows its groups by names of its own: ``3`` on rank 0 and ``3`` on rank 8 may be two groups, and one group may
have two names. What makes a group is its ranks; where the same ranks have several groups, their names tell these apart,
else what they were made for, else the order in which each rank came to use them.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from perfscope.analyzers.collectives.communication import Group

_HASH: Final = re.compile(r"^[0-9a-f]{40}")
"""torch.distributed.distributed_c10d._process_group_name, for groups that only their members create."""

_Own = tuple[int, int]
"""(rank, place among that rank's groups)."""


def unite(by_rank: Mapping[int, Sequence[Group]]) -> tuple[tuple[Group, ...], dict[int, list[int]]]:
    """(the job's groups, for each rank the place of its own groups among them).

    Groups whose ranks are not listed are the same where name and size are; those of which not even the size is known
    are one, of which nothing can be said. Names in the result are labels: no two groups share one.
    """
    alike: dict[tuple[object, ...], list[_Own]] = defaultdict(list)
    listed = _listed(by_rank)
    for rank in sorted(by_rank):
        for place, group in enumerate(by_rank[rank]):
            ranks = group.ranks or listed(rank, group)
            alike[ranks or (group.name, group.size)].append((rank, place))
    groups: list[Group] = []
    places: dict[int, list[int]] = {rank: [0] * len(own) for rank, own in by_rank.items()}
    for owned in alike.values():
        of = {own: by_rank[own[0]][own[1]] for own in owned}
        same: dict[object, list[_Own]] = defaultdict(list)
        for own, key in _told_apart(of).items():
            same[key].append(own)
        for members in same.values():
            for rank, place in members:
                places[rank][place] = len(groups)
            # One that lists its ranks, where there is such.
            groups.append(of[next((own for own in members if of[own].ranks), members[0])])
    return _labelled(groups), places


def _listed(by_rank: Mapping[int, Sequence[Group]]) -> Callable[[int, Group], tuple[int, ...]]:
    """The ranks of a group that its own recording leaves out (long lists are cut), where another rank's lists them."""
    sets: dict[tuple[str, int | None], set[tuple[int, ...]]] = defaultdict(set)
    for groups in by_rank.values():
        for group in groups:
            if group.ranks:
                sets[group.name, group.size].add(group.ranks)

    def find(rank: int, group: Group) -> tuple[int, ...]:
        fitting = [ranks for ranks in sets[group.name, group.size] if rank in ranks]
        return fitting[0] if len(fitting) == 1 else ()

    return find


def _told_apart(of: Mapping[_Own, Group]) -> dict[_Own, object]:
    """A key for each rank's group, the same on all ranks, by the first property that fits all of them."""
    most = max(Counter(rank for rank, _ in of).values())
    properties: tuple[Callable[[Group], str], ...] = (lambda group: group.name, lambda group: group.description)
    for told in properties:
        keys = {own: told(group) for own, group in of.items()}
        distinct_on_rank = len({(rank, keys[rank, place]) for rank, place in of}) == len(of)
        if distinct_on_rank and len(set(keys.values())) == most:
            return dict(keys)
    first: dict[int, int] = {}
    for rank, place in of:
        first[rank] = min(place, first.get(rank, place))
    order: dict[_Own, object] = {}
    seen: Counter[int] = Counter()
    for rank, place in sorted(of):
        order[rank, place] = seen[rank]
        seen[rank] += 1
    return order


def _labelled(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The groups under labels of their own: what they are for, or their name; their ranks where several share that."""
    labels = [group.description or _readable(group) for group in groups]
    for more in (lambda group: f"[{ranks_text(group.ranks)}]", lambda group: group.name):
        shared = Counter(labels)
        labels = [
            f"{label} {more(group)}".strip() if shared[label] > 1 else label
            for label, group in zip(labels, groups, strict=True)
        ]
    return tuple(replace(group, name=label) for label, group in zip(labels, groups, strict=True))


def _readable(group: Group) -> str:
    """A group's name; of one that torch named by a hash of its ranks, these."""
    return f"[{ranks_text(group.ranks)}]" if _HASH.match(group.name) and group.ranks else group.name


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in few words: ``0-7``, ``0,8,16``, ``0-56 by 8``; a long list without a pattern is cut short."""
    if len(ranks) > 2:
        steps = {after - before for before, after in itertools.pairwise(ranks)}
        if steps == {1}:
            return f"{ranks[0]}-{ranks[-1]}"
        if len(ranks) > 4 and len(steps) == 1:
            return f"{ranks[0]}-{ranks[-1]} by {steps.pop()}"
    if len(ranks) > 8:
        return f"{','.join(map(str, ranks[:4]))} and {len(ranks) - 4} more"
    return ",".join(map(str, ranks))
