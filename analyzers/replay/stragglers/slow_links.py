"""Slow links: the same transfer takes longer than between other ranks.

A collective runs at the pace of its slowest link, equally on all its ranks, so no rank's own time shows it. But jobs
run the same collective (kind, size, number of ranks) in several groups side by side, and a pipeline sends the same
message between many pairs. Where some of them take longer than the others, and one host or rank is in all of these and
in none of the others, its link is the cause. A host in the middle of a pipeline has most of the pairs that cross hosts:
it is told from the pairs without it. Of a lone slow group, or of several that have nothing in common, the links are
slow between its ranks: which of them is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from perfscope.analyzers.job.collectives.matched import MatchedCollectives
from perfscope.analyzers.replay.engine import Schedules
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.trace.trace import Float64, Int64

SLOWER: Final = 1.3
"""A transfer is slow from this many times its siblings' median on: a link's usual variation is smaller."""

_SIBLINGS: Final = 3
"""Fewer groups side by side have no meaningful median."""

_FAR_SLOWER: Final = 2.0
"""The same of one group beside a single other."""

_SEVERAL: Final = 2
"""Groups that a slow host is told by, at least: one may be slow by the other host's link."""

Members = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SlowLink:
    """``ranks`` share the slow link; ``scope`` is ``host`` (they are its ranks), ``rank``, or ``link`` (it is between
    them). ``factor`` is what the transfer of each collective's instance would be multiplied by were the link like the
    others: 1 for most.
    """

    ranks: tuple[int, ...]
    scope: str
    factor: Float64


def slow_links(matched: MatchedCollectives, hosts: Mapping[int, str], *, on_devices: bool = True) -> SlowLink | None:
    """The one host or rank whose link is slower than the others', else, between devices, the ranks between which links
    are; None where none is.
    """
    transfer = _transfers(matched)
    members = _members(matched)
    every = _siblings(matched, members)
    measured = [{ranks: float(transfer[lines].mean()) for ranks, lines in siblings.items()} for siblings in every]
    factor = np.ones(len(matched.instances), dtype=np.float64)
    slow: set[Members] = set()
    quick: set[Members] = set()
    for siblings, means in zip(every, measured, strict=True):
        usual = float(np.median(list(means.values())))
        for ranks, mean in means.items():
            if mean > SLOWER * usual:
                slow.add(ranks)
                factor[siblings[ranks]] = usual / mean
            else:
                quick.add(ranks)
    place = _in_common(slow, quick - slow, hosts)
    if place is not None:
        return SlowLink(*place, factor)
    of_host = _of_most(every, measured, hosts, len(matched.instances))
    # Threads that send and sum wait for cores, some longer than others: that is no link.
    if of_host is not None or not on_devices:
        return of_host
    return _of_groups(matched, transfer, _siblings(matched, members, 2), hosts)


def _of_groups(
    matched: MatchedCollectives, transfer: Int64, every: Sequence[Mapping[Members, Sequence[int]]],
    hosts: Mapping[int, str],
) -> SlowLink | None:  # fmt: skip
    """The groups that are slow in all that they run beside others which span as many hosts, if these are fewer."""
    factor = np.ones(len(matched.instances), dtype=np.float64)
    slow: set[Members] = set()
    quick: set[Members] = set()
    for siblings in every:
        for alike in _by_span(siblings, hosts):
            means = {ranks: float(transfer[alike[ranks]].mean()) for ranks in alike}
            # Of two the quicker one is what is usual.
            least = SLOWER if len(means) >= _SIBLINGS else _FAR_SLOWER
            usual = float(np.median(list(means.values()))) if len(means) >= _SIBLINGS else min(means.values())
            late = {ranks for ranks, mean in means.items() if mean > least * usual}
            slow |= late
            quick |= means.keys() - late
            for ranks in late:
                factor[alike[ranks]] = usual / means[ranks]
    slow -= quick
    if not slow or len(slow) > len(quick):
        return None
    kept = np.isin(np.arange(len(factor)), [line for each in every for ranks in slow for line in each.get(ranks, ())])
    ranks = tuple(sorted({rank for group in slow for rank in group}))
    return SlowLink(ranks, "link", np.where(kept, factor, 1.0))


def _by_span(siblings: Mapping[Members, Sequence[int]], hosts: Mapping[int, str]) -> list[dict[Members, Sequence[int]]]:
    """Those that lie on as many hosts, if there are several: links between hosts are slower than those inside."""
    spans = grouped((len({hosts.get(rank, "") for rank in ranks}), (ranks, lines)) for ranks, lines in siblings.items())
    return [dict(alike) for alike in spans.values() if len(alike) > 1]


def _of_most(
    every: Sequence[Mapping[Members, Sequence[int]]],
    measured: Sequence[Mapping[Members, float]],
    hosts: Mapping[int, str],
    instances: int,
) -> SlowLink | None:
    """The one host all of whose transfers with others take longer than all between those, even if most are its."""
    found = []
    for host in sorted(set(hosts.values()) - {""}):
        factor, slower = np.ones(instances, dtype=np.float64), []
        for siblings, means in zip(every, measured, strict=True):
            across = {ranks for ranks in means if len({hosts.get(rank, "") for rank in ranks}) > 1}
            mine = {ranks for ranks in across if host in {hosts.get(rank, "") for rank in ranks}}
            others = [means[ranks] for ranks in across - mine]
            if len(mine) < _SEVERAL or not others:
                continue
            slower.append(min(means[ranks] for ranks in mine) > SLOWER * max(others))
            for ranks in mine:
                factor[siblings[ranks]] = float(np.median(others)) / means[ranks]
        if slower and all(slower):
            found.append(SlowLink(tuple(sorted(rank for rank, name in hosts.items() if name == host)), "host", factor))
    return found[0] if len(found) == 1 else None


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


def _siblings(
    matched: MatchedCollectives, members: Sequence[Members], least: int = _SIBLINGS
) -> list[dict[Members, list[int]]]:
    """Instances of one kind, size and number of ranks, by their ranks, where ``least`` groups or more run them."""
    alike: dict[tuple[int, int, int], dict[Members, list[int]]] = {}
    instances = matched.instances
    lines = zip(members, instances.kind.tolist(), instances.bytes.tolist(), strict=True)
    for number, (ranks, kind, size) in enumerate(lines):
        if len(ranks) > 1 and size > 0:
            alike.setdefault((kind, size, len(ranks)), {}).setdefault(ranks, []).append(number)
    return [siblings for siblings in alike.values() if len(siblings) >= least]


def _in_common(slow: set[Members], quick: set[Members], hosts: Mapping[int, str]) -> tuple[tuple[int, ...], str] | None:
    """The one host, else the one rank, that all slow groups have and no quick one leaves."""
    if not slow:
        return None
    for scope, places in (("host", hosts), ("rank", {rank: str(rank) for ranks in slow | quick for rank in ranks})):
        across = {ranks: {places.get(rank, "") for rank in ranks} for ranks in slow | quick}
        shared = set.intersection(*(across[ranks] for ranks in slow))
        # Quick inside a host says nothing of its links to others, but of those inside.
        within = any(len(across[ranks]) == 1 for ranks in slow)
        shared -= {place for ranks in quick if within or len(across[ranks]) > 1 for place in across[ranks]}
        shared.discard("")
        if len(shared) == 1 and len(slow) > 1:
            place = shared.pop()
            everyone = {rank for ranks in slow | quick for rank in ranks}
            return tuple(sorted(rank for rank in everyone if places.get(rank) == place)), scope
    return None
