"""Process groups across ranks: which of the ranks' own groups are the same, and what to call them.

Each rank has its own names for its groups: ``3`` on rank 0 and ``3`` on rank 8 may be two groups, and one group may
have two names. A group is identified by its ranks; where the same ranks have several groups, by their names too, else
by their descriptions, else by the order in which each rank first used them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from perfscope.analyzers.rank.collectives.collectives import Group
from perfscope.grouping import grouped
from perfscope.text import rank_list

_HASH: Final = re.compile(r"^[0-9a-f]{40}")
"""torch.distributed.distributed_c10d._process_group_name, for groups that only their members create."""

_Own = tuple[int, int]
"""(rank, place among that rank's groups)."""


def unite(by_rank: Mapping[int, Sequence[Group]]) -> tuple[tuple[Group, ...], dict[int, list[int]]]:
    """(the job's groups, for each rank the place of its own groups among them).

    Groups whose ranks are not listed are the same where name and size are; those of unknown size are one group, about
    which nothing is known. Names in the result are labels: no two groups share one.
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
        same = grouped((key, own) for own, key in _distinguished(of).items())
        for members in same.values():
            for rank, place in members:
                places[rank][place] = len(groups)
            # The description that lists the ranks, where one does.
            groups.append(of[next((own for own in members if of[own].ranks), members[0])])
    return _labelled(groups), places


def _listed(by_rank: Mapping[int, Sequence[Group]]) -> Callable[[int, Group], tuple[int, ...]]:
    """Finds the ranks of a group that one rank's trace leaves out (long lists are cut) in another rank's."""
    sets: dict[tuple[str, int | None], set[tuple[int, ...]]] = defaultdict(set)
    for groups in by_rank.values():
        for group in groups:
            if group.ranks:
                sets[group.name, group.size].add(group.ranks)

    def find(rank: int, group: Group) -> tuple[int, ...]:
        fitting = [ranks for ranks in sets[group.name, group.size] if rank in ranks]
        return fitting[0] if len(fitting) == 1 else ()

    return find


def _distinguished(of: Mapping[_Own, Group]) -> dict[_Own, object]:
    """A key for each rank's group, the same on all ranks, by the first property that fits all of them."""
    most = max(Counter(rank for rank, _ in of).values())
    properties: tuple[Callable[[Group], str], ...] = (lambda group: group.name, lambda group: group.description)
    for label in properties:
        keys = {own: label(group) for own, group in of.items()}
        distinct_on_rank = len({(rank, keys[rank, place]) for rank, place in of}) == len(of)
        if distinct_on_rank and len(set(keys.values())) == most:
            return dict(keys)
    order: dict[_Own, object] = {}
    seen: Counter[int] = Counter()
    for rank, place in sorted(of):
        order[rank, place] = seen[rank]
        seen[rank] += 1
    return order


def _labelled(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The groups under labels of their own: description or name, and their ranks where several groups share that."""
    labels = [group.description or _readable(group) for group in groups]
    for more in (lambda group: f"[{rank_list(group.ranks)}]", lambda group: group.name):
        shared = Counter(labels)
        labels = [
            f"{label} {more(group)}".strip() if shared[label] > 1 else label
            for label, group in zip(labels, groups, strict=True)
        ]
    return tuple(replace(group, name=label) for label, group in zip(labels, groups, strict=True))


def _readable(group: Group) -> str:
    """A group's name; its ranks where torch named it by a hash of them."""
    return f"[{rank_list(group.ranks)}]" if _HASH.match(group.name) and group.ranks else group.name
