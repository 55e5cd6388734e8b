"""Slow links: the same transfer takes longer than between other ranks.

A collective runs at the pace of its slowest link, equally on all its ranks, so no rank's own time shows it. But jobs
run the same collective (kind, size, number of ranks) in several groups side by side, and a pipeline sends the same
message between many pairs. Where some of them take longer than the others, and one host or rank is in all of these and
in none of the others, its link is the cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from perfscope.analyzers.job.collectives.matched import MatchedCollectives
from perfscope.analyzers.replay.engine import Schedules
from perfscope.frozen import dataclass
from perfscope.trace.trace import Float64, Int64

SLOWER: Final = 1.3
"""A transfer is slow from this many times its siblings' median on: a link's usual variation is smaller."""

_SIBLINGS: Final = 3
"""Fewer groups side by side have no meaningful median."""

Members = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SlowLink:
    """``ranks`` share the slow link; ``scope`` is ``host`` (they are its ranks) or ``rank``. ``factor`` is what the
    transfer of each collective's instance would be multiplied by were the link like the others: 1 for most.
    """

    ranks: tuple[int, ...]
    scope: str
    factor: Float64


def slow_links(matched: MatchedCollectives, hosts: Mapping[int, str]) -> SlowLink | None:
    """The one host or rank whose link is slower than the others'; None where none is, or several are."""
    members = _members(matched)
    transfer = _transfers(matched)
    factor = np.ones(len(matched.instances), dtype=np.float64)
    slow: set[Members] = set()
    quick: set[Members] = set()
    for siblings in _siblings(matched, members):
        means = {ranks: float(transfer[lines].mean()) for ranks, lines in siblings.items()}
        usual = float(np.median(list(means.values())))
        for ranks, mean in means.items():
            if mean > SLOWER * usual:
                slow.add(ranks)
                factor[siblings[ranks]] = usual / mean
            else:
                quick.add(ranks)
    place = _in_common(slow, quick - slow, hosts)
    return SlowLink(*place, factor) if place is not None else None


def with_usual_links(schedules: Schedules, link: SlowLink) -> Schedules:
    """Schedules in which the slow link is like the others."""
    known = schedules.instance < len(link.factor)
    factor = np.where(known, link.factor[np.where(known, schedules.instance, 0)], 1.0)
    return replace(schedules, transfer_ns=np.round(schedules.transfer_ns * factor).astype(np.int64))


def _members(matched: MatchedCollectives) -> list[Members]:
    """The ranks of each instance; empty where not all of them are in the recording."""
    first = np.searchsorted(matched.instance, np.arange(len(matched.instances) + 1))
    ranks = matched.rank.tolist()
    complete = matched.instances.complete.tolist()
    return [tuple(ranks[first[i] : first[i + 1]]) if complete[i] else () for i in range(len(complete))]


def _transfers(matched: MatchedCollectives) -> Int64:
    """Transfer of each instance: the longest of its ranks', which the others wait for."""
    longest = np.zeros(len(matched.instances), dtype=np.int64)
    np.maximum.at(longest, matched.instance, matched.transfer_ns)
    return longest


def _siblings(matched: MatchedCollectives, members: Sequence[Members]) -> list[dict[Members, list[int]]]:
    """Instances of one kind, size and number of ranks, by their ranks, where several groups run them."""
    alike: dict[tuple[int, int, int], dict[Members, list[int]]] = {}
    instances = matched.instances
    lines = zip(members, instances.kind.tolist(), instances.bytes.tolist(), strict=True)
    for number, (ranks, kind, size) in enumerate(lines):
        if len(ranks) > 1 and size > 0:
            alike.setdefault((kind, size, len(ranks)), {}).setdefault(ranks, []).append(number)
    return [siblings for siblings in alike.values() if len(siblings) >= _SIBLINGS]


def _in_common(slow: set[Members], quick: set[Members], hosts: Mapping[int, str]) -> tuple[tuple[int, ...], str] | None:
    """The one host, else the one rank, that all slow groups have and no quick one leaves."""
    if not slow:
        return None
    for scope, places in (("host", hosts), ("rank", {rank: str(rank) for ranks in slow | quick for rank in ranks})):
        across = {ranks: {places.get(rank, "") for rank in ranks} for ranks in slow | quick}
        shared = set.intersection(*(across[ranks] for ranks in slow))
        shared -= {place for ranks in quick if len(across[ranks]) > 1 for place in across[ranks]}
        shared.discard("")
        if len(shared) == 1 and len(slow) > 1:
            place = shared.pop()
            everyone = {rank for ranks in slow | quick for rank in ranks}
            return tuple(sorted(rank for rank in everyone if places.get(rank) == place)), scope
    return None
