"""The group of collectives where no trace says which ranks take part, or how many ranks the job has.

Traces that state neither are told apart by their files' names alone. Where these are ranks 0 to N - 1, and each of them
issues the same collectives in every step, which end on all of them at the same time, these ranks are taken for all of
the job, and such collectives for theirs. Ranks of groups of which each has a rhythm of its own do not pass for one::

    rank 0   all-reduce ends at 10.0 and at 20.0
    rank 1   all-reduce ends at 10.7 and at 20.7    its clock is 0.7 ahead: the same collectives
    rank 2   all-reduce ends at 10.3 and at 23.1    not the same
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from perfscope.analyzers.rank.collectives.collectives import POINT_TO_POINT, UNKNOWN_GROUP, Group
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.frozen import dataclass
from perfscope.trace.trace import Int64

NAME: Final = "world"
"""Name of the group that is assumed."""

_MOST: Final = 0.9
"""Share of a rank's collectives that must end when they do on the first rank."""
_SAME_END_NS: Final = 500_000
"""Ends of one collective lie closer together, on clocks that are apart by their median."""
_ALIKE: Final = 0.5
"""Share of the common steps in which the ranks must issue the same: the first and the last one may be cut."""


def with_assumed_world(partials: Mapping[int, RankPartial]) -> dict[int, RankPartial] | None:
    """The same, in which collectives of unknown groups are of all ranks; None where that cannot be assumed, or nothing
    is unknown.
    """
    unknown = any(not _is_known(group) for partial in partials.values() for group in _groups(partial))
    if len(partials) < 2 or not unknown or sorted(partials) != list(range(len(partials))):
        return None
    if any(partial.world_size is not None for partial in partials.values()):
        return None
    if any(_is_known(group) for partial in partials.values() for group in _groups(partial)):
        return None  # of a part of the ranks, perhaps
    if not _names_agree(partials) or not _issue_alike(partials):
        return None
    return {rank: _of_all(partial, len(partials)) for rank, partial in partials.items()}


def _groups(partial: RankPartial) -> list[Group]:
    own = partial.collectives
    return [own.groups[index] for index in np.unique(own.group).tolist()]


def _is_known(group: Group) -> bool:
    return bool(group.ranks) or group.size is not None


def _names_agree(partials: Mapping[int, RankPartial]) -> bool:
    """Does every rank name the same groups?"""
    named = {frozenset(group.name for group in _groups(partial)) for partial in partials.values()}
    return len(named) == 1


def _issue_alike(partials: Mapping[int, RankPartial]) -> bool:
    every = [_by_step(partial) for partial in partials.values()]
    common = set.intersection(*(set(steps) for steps in every))
    alike = [step for step in sorted(common) if len({tuple(sorted(steps[step].kinds)) for steps in every}) == 1]
    if not alike or len(alike) < _ALIKE * len(common):
        return False
    first, *others = (np.concatenate([np.sort(steps[step].end_ns) for step in alike]) for steps in every)
    return all(_end_together(first, other) for other in others)


@dataclass(frozen=True, eq=False)
class _Issued:
    """Kinds and ends of one rank's collectives of a step, but for messages."""

    kinds: list[str]
    end_ns: Int64


def _by_step(partial: RankPartial) -> dict[int, _Issued]:
    own, found = partial.collectives, {}
    among_all = np.array([kind not in POINT_TO_POINT for kind in own.kinds] or [False], dtype=np.bool_)
    for step, number in enumerate(partial.steps.number.tolist()):
        rows = np.flatnonzero((own.step == step) & among_all[own.kind])
        found[number] = _Issued([own.kinds[kind] for kind in own.kind[rows].tolist()], own.end_ns[rows])
    return found


def _end_together(first: Int64, other: Int64) -> bool:
    apart = other - first
    if len(apart) == 0:
        return True  # messages only
    return bool(np.mean(np.abs(apart - np.median(apart)) <= _SAME_END_NS) >= _MOST)


def _of_all(partial: RankPartial, size: int) -> RankPartial:
    world = Group(name=NAME, ranks=tuple(range(size)), size=size)
    groups = tuple(
        world if group == UNKNOWN_GROUP else replace(world, name=group.name, description=group.description)
        for group in partial.collectives.groups
    )
    return replace(partial, world_size=size, collectives=replace(partial.collectives, groups=groups))
