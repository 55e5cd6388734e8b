"""Who made the others wait, why, and how much step time it cost.

Lost time of a rank is the step time that would be saved were it as fast as the median of its peers: the recorded steps
are played again with that rank at its peers' pace, and what they then take less is what it cost. That holds where waits
pass through several ranks and groups, where they hide transfers, and where another rank would have been waited for
anyway (curing this one then saves nothing). The category in which it exceeds its peers is the cause.

Example, two ranks that meet in one all-reduce::

    rank 0   compute 30, exposed all-reduce 15 (of which it waits 10)
    rank 1   host pause 10, compute 30, exposed all-reduce 5

At rank 0's pace rank 1 would not pause, and both would take 35 instead of 45: rank 1 cost the job 10, by its host.

The ranks of one host that are slow alike are one culprit: cured one by one, none of them would save anything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.collectives.matching import Matched
from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.replay.engine import Played, Programs, play
from perfscope.analyzers.replay.pace import Peers, at_peers_pace, find_peers
from perfscope.analyzers.replay.programs import Recorded
from perfscope.analyzers.straggling.slow_links import slow_links, with_usual_links
from perfscope.analyzers.straggling.slow_stages import SlowStage, at_other_stages_pace, slow_stages
from perfscope.analyzers.timeline import Row
from perfscope.medians import SIGMA_OF_MAD
from perfscope.trace import Bool, Int64

NOISE: Final = 0.02
"""Share of the step below which a loss is not told from noise."""

CAUSES: Final = {
    Row.COMPUTE: "compute",
    Row.COPY: "copy",
    Row.DATALOADER: "dataloader",
    Row.SYNC: "sync",
    Row.LAUNCH: "launch",
    Row.HOST: "host",
    Row.DEPENDENCY: "launch",
    Row.UNKNOWN: "host",
}
"""Row of the account that is a rank's own time -> cause as the summary names it."""

_OWN: Final = np.array([int(row) for row in CAUSES])

_CANDIDATES: Final = 24
"""Ranks that are tried one by one, those with the most time over their peers first. More than a few that each cost
2 % of the step cannot be."""

_TOGETHER: Final = 1.5
"""How many times as much a host must cost as the worst of its ranks alone to be the culprit in their place."""

_ALIKE: Final = 0.75
"""Share of a host's ranks that must be slow for the host to be."""

_AT_ONCE: Final = 0.5
"""Share of hits above which a host's ranks are slow at once, and of hit steps above which ranks are struck singly."""

_IN_TURN_RANKS: Final = 3
"""Two ranks that are slow in different steps have two causes; from three on it is one that goes round."""

_IN_TURN: Final = 4.0
"""How many times its usual distance the slowest rank of a step must lie above the median to be hit by something: the
slowest of many ranks is always slower than the median, pauses are not of that size."""


@dataclass(frozen=True, eq=False)
class Lateness:
    """What some ranks cost the job: ``lost_ns`` per step, ``per_step_ns`` in each used step, and the main cause.

    ``lost_ns`` is the mean of ``per_step_ns``, whose single steps may be negative: what one step saves, another may
    wait. ``scope`` and ``ranks`` are as in ``StragglerRow``; ``rank`` is the one with the most time over its peers.
    """

    rank: int
    ranks: tuple[int, ...]
    scope: str
    cause: str
    lost_ns: float
    per_step_ns: Int64


def find_lateness(
    result: Comparison, recorded: Recorded, base: Played, hosts: Mapping[int, str]
) -> tuple[Lateness, ...]:
    """Everyone who cost the job more than noise, the costliest first.

    ``base`` is the unchanged replay; ``hosts`` names each rank's host, where known. Empty where nothing can be
    compared: a single rank, or programs that do not play to their end.
    """
    if not base.complete:
        return ()
    search = _Search(recorded, base, find_peers(result, recorded), hosts)
    found = [*search.run(), *search.slow_link(result.matched_before)]
    found += _slow_stages(result, search, hosts, blamed={rank for late in found for rank in late.ranks})
    return tuple(sorted(found, key=lambda late: (-late.lost_ns, late.rank)))


class _Search:
    """Tries cures and keeps what they save."""

    def __init__(self, recorded: Recorded, base: Played, groups: Sequence[Peers], hosts: Mapping[int, str]) -> None:
        self._recorded = recorded
        self._slowest_ns = recorded.slowest_ns(base)
        self._noise = NOISE * float(self._slowest_ns.mean())
        self._peers = {rank: peers for peers in groups for rank in peers.ranks}
        self._hosts = hosts
        self._excess = {rank: excess for peers in groups for rank, excess in _excess(recorded, peers).items()}
        over = {rank: float(np.maximum(excess, 0).mean()) for rank, excess in self._excess.items()}
        self._slow = [rank for rank in sorted(over, key=lambda rank: -over[rank]) if over[rank] >= self._noise]
        self._struck = {rank for peers in groups for rank in _struck(recorded, peers)}

    @property
    def programs(self) -> Programs:
        """The recorded steps."""
        return self._recorded.programs

    def run(self) -> list[Lateness]:
        """Single ranks, then what costs more than its ranks one by one: a host, or ranks in turn."""
        found = [late for rank in self._slow[:_CANDIDATES] if (late := self._cured((rank,), "rank")) is not None]
        for scope, members in (*(("host", members) for members in self._slow_hosts()), ("job", self._taking_turns())):
            alone = [other.lost_ns for other in found if other.rank in members]
            late = self._cured(members, scope) if members else None
            if late is not None and late.lost_ns >= _TOGETHER * max(alone, default=0.0):
                found = [other for other in found if other.rank not in members]
                found.append(late)
        return found

    def slow_link(self, matched: Matched) -> list[Lateness]:
        """The host or rank whose link is slower than the others', if it costs more than noise."""
        link = slow_links(matched, self._hosts)
        saved = self.saved(with_usual_links(self._recorded.programs, link)) if link is not None else None
        if link is None or saved is None:
            return []
        return [Lateness(link.ranks[0], link.ranks, link.scope, "communication", float(saved.mean()), saved)]

    def _hits(self, ranks: Sequence[int]) -> Bool:
        """Which of these ranks (lines) were slow in which used step (columns)."""
        return np.stack([self._excess[rank] >= self._noise for rank in ranks])

    def _slow_hosts(self) -> list[tuple[int, ...]]:
        """The slow ranks of each host nearly all of whose ranks are slow in the same steps, where there are others."""
        members: dict[str, list[int]] = {}
        for rank in self._peers:
            members.setdefault(self._hosts.get(rank, ""), []).append(rank)
        members.pop("", None)
        slow = set(self._slow)
        found = []
        for ranks in members.values() if len(members) > 1 else ():
            mine = sorted(slow.intersection(ranks))
            if len(mine) >= max(2, _ALIKE * len(ranks)):
                hits = self._hits(mine)
                if hits[:, hits.any(axis=0)].mean() >= _AT_ONCE:
                    found.append(tuple(mine))
        return found

    def _taking_turns(self) -> tuple[int, ...]:
        """Ranks that something strikes in turn, seldom two at once; empty where nothing does."""
        ranks = sorted(self._struck)
        if len(ranks) < _IN_TURN_RANKS:
            return ()
        hits = self._hits(ranks)
        at_once = hits.sum(axis=0)
        turns = hits[:, at_once > 0].argmax(axis=0)
        changes = int((turns[1:] != turns[:-1]).sum())
        alone = float((at_once[at_once > 0] == 1).mean()) if len(turns) else 0.0
        return tuple(ranks) if changes >= _IN_TURN_RANKS - 1 and alone >= _AT_ONCE else ()

    def _cured(self, ranks: tuple[int, ...], scope: str) -> Lateness | None:
        """What these ranks cost together; None where that is no more than noise."""
        saved = self.saved(at_peers_pace(self._recorded, self._peers, ranks))
        if saved is None:
            return None
        worst = max(ranks, key=lambda rank: (float(self._excess[rank].sum()), -rank))
        return Lateness(worst, tuple(sorted(ranks)), scope, self._cause(ranks), float(saved.mean()), saved)

    def saved(self, programs: Programs) -> Int64 | None:
        """By how much each used step is shorter in ``programs``; None where that is no more than noise."""
        played = play(programs)
        if not played.complete:
            return None
        saved = self._slowest_ns - self._recorded.slowest_ns(played)
        # Ranks do not begin a recording together, and that skew is nobody's fault: where no step before the first used
        # one was recorded, a loss in that one alone is no evidence.
        only_first = len(saved) > 1 and self._recorded.used[0] and saved[1:].sum() <= 0
        return saved if saved.mean() >= self._noise and not only_first else None

    def _cause(self, ranks: Sequence[int]) -> str:
        """The category in which these ranks exceed their peers most, over the used steps in which they are slower: in
        the others it may be a peer that stands out.
        """
        total = np.zeros(len(Row), dtype=np.float64)
        for rank in ranks:
            peers = self._peers[rank]
            slower = self._recorded.used.copy()
            slower[slower] = self._excess[rank] > 0
            total += peers.excess_ns(rank, ranks)[slower[peers.step]].sum(axis=0)
        return CAUSES[Row(int(_OWN[np.argmax(total[_OWN])]))]


def _slow_stages(
    result: Comparison, search: _Search, hosts: Mapping[int, str], blamed: Collection[int]
) -> list[Lateness]:
    """Pipeline stages that do the same work as others, more slowly; ``blamed`` ranks have their cause already.

    Where all stages of one host are slow, it is the host, as long as that costs more than they do one by one.
    """
    slow = slow_stages(result, blamed)
    found = [late for stage in slow if (late := _cured_stages(search, (stage,), "stage", hosts)) is not None]
    for name in sorted({name for name in hosts.values() if name}):
        on_host = tuple(stage for stage in slow if {hosts.get(rank) for rank in stage.ranks} == {name})
        if len(on_host) < 2 or not _is_a_host(_ranks_of(on_host), hosts):
            continue
        late = _cured_stages(search, on_host, "host", hosts)
        alone = [other.lost_ns for other in found if hosts.get(other.rank) == name]
        if late is not None and late.lost_ns >= _TOGETHER * max(alone, default=0.0):
            found = [other for other in found if hosts.get(other.rank) != name]
            found.append(late)
    return found


def _cured_stages(
    search: _Search, stages: tuple[SlowStage, ...], scope: str, hosts: Mapping[int, str]
) -> Lateness | None:
    """What these stages cost together; None where that is no more than noise."""
    saved = search.saved(at_other_stages_pace(search.programs, stages))
    if saved is None:
        return None
    ranks = _ranks_of(stages)
    worst = max(stages, key=lambda stage: 1 / stage.factor)
    scope = "host" if _is_a_host(ranks, hosts) else "rank" if len(ranks) == 1 else scope
    return Lateness(worst.slowest, ranks, scope, CAUSES[worst.row], float(saved.mean()), saved)


def _ranks_of(stages: Collection[SlowStage]) -> tuple[int, ...]:
    return tuple(sorted(rank for stage in stages for rank in stage.ranks))


def _is_a_host(ranks: tuple[int, ...], hosts: Mapping[int, str]) -> bool:
    """Are these all ranks of one host, and are there others?"""
    names = {hosts.get(rank, "") for rank in ranks}
    whole = tuple(sorted(rank for rank, name in hosts.items() if name in names))
    return len(names) == 1 and "" not in names and len(ranks) > 1 and whole == ranks and len(set(hosts.values())) > 1


def _own_in_step(recorded: Recorded, peers: Peers) -> Int64:
    """Own time of each rank (lines) in each used step (columns)."""
    steps = np.flatnonzero(recorded.used)
    return np.stack([peers.own_ns[:, peers.step == step].sum(axis=1) for step in steps], axis=1)


def _excess(recorded: Recorded, peers: Peers) -> dict[int, Int64]:
    """By how much each rank's own time exceeds its peers' median in each used step."""
    own = _own_in_step(recorded, peers)
    if len(own) == 2:
        return {rank: own[index] - own[1 - index] for index, rank in enumerate(peers.ranks)}
    middle = np.median(own, axis=0)
    return {rank: (own[index] - middle).astype(np.int64) for index, rank in enumerate(peers.ranks)}


def _struck(recorded: Recorded, peers: Peers) -> list[int]:
    """Ranks that were the slowest of some used step, and far slower than ranks usually differ."""
    own = _own_in_step(recorded, peers)
    distance = own - np.median(own, axis=0)
    usual = float(np.median(np.abs(distance))) * SIGMA_OF_MAD
    hit = (distance > _IN_TURN * usual) & (distance > NOISE * float(np.median(own)))
    return [peers.ranks[index] for index in np.unique(own.argmax(axis=0)[hit.any(axis=0)])]
