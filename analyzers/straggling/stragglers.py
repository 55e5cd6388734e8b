"""Who made the others wait, why, and how much step time it cost.

Lost time of a rank is the step time that would be saved were it as fast as the median of its peers: the recorded steps
are played again with that rank at its peers' pace, and what they then take less is what it cost. That holds where waits
pass through several ranks and groups, where they hide transfers, and where another rank would have been waited for
anyway (curing this one then saves nothing). The category in which it exceeds its peers is the cause.

Example, two ranks that meet in one all-reduce::

    rank 0   compute 30, exposed all-reduce 15 (of which it waits 10)
    rank 1   host pause 10, compute 30, exposed all-reduce 5

At rank 0's pace rank 1 would not pause, and both would take 35 instead of 45: rank 1 cost the job 10, by its host.

The ranks of one host that are slow alike are one culprit, and so are any ranks that are slow by the same cause in the
same steps: cured one by one, none of them would save anything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.collectives.matching import Matched
from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.replay.engine import Played, Programs, play
from perfscope.analyzers.replay.pace import at_peers_pace, find_peers
from perfscope.analyzers.replay.programs import Recorded
from perfscope.analyzers.straggling.excess import NOISE, excess, excess_apart, most_apart, own_in_step, struck
from perfscope.analyzers.straggling.host_bound import HostBound
from perfscope.analyzers.straggling.slow_links import slow_links, with_usual_links
from perfscope.analyzers.straggling.slow_stages import SlowStage, at_other_stages_pace, slow_stages
from perfscope.analyzers.timeline import Row
from perfscope.trace import Bool, Int64

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
"""Share of a host's ranks that must be slow for the host to be, and of the slowest rank's excess that others must have
to be slow alike."""

_SAME_STEPS: Final = 0.75
"""Share of hits above which ranks that share no host are slow alike: noise strikes each at another time."""

_AT_ONCE: Final = 0.5
"""Share of hits above which a host's ranks are slow at once, and of hit steps above which ranks are struck singly."""

_IN_TURN_RANKS: Final = 3
"""Two ranks that are slow in different steps have two causes; from three on it is one that goes round."""


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
    search = _Search(result, recorded, base, hosts)
    found = [*search.run(), *search.slow_link(result.matched_before)]
    found += _slow_stages(result, search, hosts, blamed={rank for late in found for rank in late.ranks})
    return tuple(sorted(found, key=lambda late: (-late.lost_ns, late.rank)))


class _Search:
    """Tries cures and keeps what they save."""

    def __init__(self, result: Comparison, recorded: Recorded, base: Played, hosts: Mapping[int, str]) -> None:
        groups = find_peers(result, recorded)
        self._recorded = recorded
        self._host_bound = HostBound.of(result, recorded)
        self._slowest_ns = recorded.slowest_ns(base)
        replayed_ns = float(self._slowest_ns.mean())
        # What the replay itself is wrong by nobody can be charged with.
        self._noise = NOISE * replayed_ns + abs(replayed_ns - result.step_ns)
        self._peers = {rank: peers for peers in groups for rank in peers.ranks}
        self._hosts = hosts
        self._in_loader_ns = {
            rank: float(partial.loading.waited_ns[partial.steps.indices_of(result.steps)].mean())
            for rank, partial in result.partials.items()
        }
        self._own = [(peers, own_in_step(recorded, peers)) for peers in groups]
        self._excess = {rank: over for peers, own in self._own for rank, over in excess(peers, own).items()}
        over = {rank: float(np.maximum(excess, 0).mean()) for rank, excess in self._excess.items()}
        self._slow = [rank for rank in sorted(over, key=lambda rank: -over[rank]) if over[rank] >= self._noise]
        self._struck = {rank for peers, own in self._own for rank in struck(peers, own)}

    @property
    def programs(self) -> Programs:
        """The recorded steps."""
        return self._recorded.programs

    def run(self) -> list[Lateness]:
        """Single ranks, then what costs more than its ranks one by one: a host, several ranks, or ranks in turn."""
        found = [late for rank in self._slow[:_CANDIDATES] if (late := self._cured((rank,), "rank")) is not None]
        for members in self._slow_hosts():
            found = self._with(found, members, "host")
        on_hosts = {rank for late in found if late.scope == "host" for rank in late.ranks}
        for members in self._slow_alike(without=on_hosts):
            found = self._with(found, self._needed(members), "ranks")
        return self._with(found, self._taking_turns(), "job")

    def _with(self, found: list[Lateness], members: tuple[int, ...], scope: str) -> list[Lateness]:
        """``found`` with these ranks as one culprit, where they cost so much more than each of them alone."""
        alone = [other.lost_ns for other in found if other.rank in members]
        late = self._cured(members, scope) if len(members) > 1 else None
        if late is None or late.lost_ns < _TOGETHER * max(alone, default=0.0):
            return found
        return [*(other for other in found if other.rank not in members), late]

    def slow_link(self, matched: Matched) -> list[Lateness]:
        """The host or rank whose link is slower than the others', if it costs more than noise."""
        link = slow_links(matched, self._hosts)
        saved = self.saved(with_usual_links(self._recorded.programs, link), ()) if link is not None else None
        if link is None or saved is None:
            return []
        return [Lateness(link.ranks[0], link.ranks, link.scope, "communication", float(saved.mean()), saved)]

    def _slow_hosts(self) -> list[tuple[int, ...]]:
        """The slow ranks of each host nearly all of whose ranks are slow in the same steps, where there are others.

        They are compared with the ranks of the other hosts alone: where half of all ranks are slow, the median of all
        lies half-way.
        """
        members: dict[str, list[int]] = {}
        for rank in self._peers:
            members.setdefault(self._hosts.get(rank, ""), []).append(rank)
        members.pop("", None)
        most = {rank: over for peers, own in self._own for rank, over in most_apart(peers, own, self._hosts).items()}
        slow = {rank for rank, over in most.items() if np.maximum(over, 0).mean() >= self._noise}
        found = []
        for ranks in members.values() if len(members) > 1 else ():
            if len(slow.intersection(ranks)) < max(2, _ALIKE * len(ranks)):
                continue  # A job has thousands of hosts, few of them slow.
            apart = {rank: over for peers, own in self._own for rank, over in excess_apart(peers, own, ranks).items()}
            mine = sorted(rank for rank, over in apart.items() if np.maximum(over, 0).mean() >= self._noise)
            if len(mine) < max(2, _ALIKE * len(ranks)):
                continue
            if _at_once(np.stack([apart[rank] >= self._noise for rank in mine])) >= _AT_ONCE:
                found.append(tuple(mine))
        return found

    def _slow_alike(self, without: Collection[int]) -> list[tuple[int, ...]]:
        """Ranks that are as slow as one another in the same steps and by the same cause, the slowest first: where one
        is cured, the others are waited for all the same. No more than half of those that do the same work: beyond
        that they are what is usual.
        """
        usual = {rank: float(self._excess[rank].mean()) for rank in self._slow[:_CANDIDATES] if rank not in without}
        by_cause: dict[str, list[int]] = {}
        for rank in sorted(usual, key=lambda rank: -usual[rank]):
            if usual[rank] >= self._noise:
                by_cause.setdefault(self._cause((rank,)), []).append(rank)
        found = []
        for ranks in by_cause.values():
            alike = tuple(rank for rank in ranks if usual[rank] >= _ALIKE * usual[ranks[0]])
            few = all(2 * len(set(peers.ranks).intersection(alike)) <= len(peers.ranks) for peers, _ in self._own)
            if len(alike) > 1 and few:
                hits = np.stack([self._excess[rank] >= self._noise for rank in alike])
                found += [alike] if _at_once(hits) >= _SAME_STEPS else []
        return found

    def _needed(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The first of these without which nearly as much would be saved as with all; empty where that is nothing."""
        whole = self._cured(ranks, "ranks")
        if whole is None:
            return ()
        for count in range(1, len(ranks)):
            part = self._cured(ranks[:count], "ranks")
            if part is not None and part.lost_ns >= whole.lost_ns - self._noise:
                return ranks[:count]
        return ranks

    def _taking_turns(self) -> tuple[int, ...]:
        """Ranks that something strikes in turn, seldom two at once; empty where nothing does. Those that are slow most
        of the time are not among them.
        """
        hit = {rank: self._excess[rank] >= self._noise for rank in sorted(self._struck)}
        ranks = [rank for rank, steps in hit.items() if steps.mean() <= _AT_ONCE]
        if len(ranks) < _IN_TURN_RANKS:
            return ()
        hits = np.stack([hit[rank] for rank in ranks])
        at_once = hits.sum(axis=0)
        turns = hits[:, at_once > 0].argmax(axis=0)
        changes = int((turns[1:] != turns[:-1]).sum())
        alone = float((at_once[at_once > 0] == 1).mean()) if len(turns) else 0.0
        return tuple(ranks) if changes >= _IN_TURN_RANKS - 1 and alone >= _AT_ONCE else ()

    def _cured(self, ranks: tuple[int, ...], scope: str) -> Lateness | None:
        """What these ranks cost together; None where that is no more than noise."""
        saved = self.saved(at_peers_pace(self._recorded, self._peers, ranks), ranks)
        if saved is None:
            return None
        cause = self._cause(ranks)
        if cause == CAUSES[Row.DATALOADER] and not self._load_longer(ranks, float(saved.mean())):
            return None
        worst = max(ranks, key=lambda rank: (float(self._excess[rank].sum()), -rank))
        return Lateness(worst, tuple(sorted(ranks)), scope, cause, float(saved.mean()), saved)

    def _load_longer(self, ranks: Sequence[int], lost_ns: float) -> bool:
        """Whether these ranks are in the loader for so much longer than the others. Where all loaders are slow, it may
        be one rank alone whose device has no work left to hide that.
        """
        others = [waited for rank, waited in self._in_loader_ns.items() if rank not in ranks]
        usual = float(np.median(others)) if others else 0.0
        return max(self._in_loader_ns[rank] for rank in ranks) - usual >= lost_ns / 2

    def saved(self, programs: Programs, cured: Collection[int]) -> Int64 | None:
        """By how much each used step is shorter in ``programs``, in which ``cured`` are no slower than others; None
        where that is no more than noise.
        """
        played = play(programs)
        if not played.complete:
            return None
        least = np.minimum(self._host_bound.floor_ns(cured), self._slowest_ns)
        saved = self._slowest_ns - np.maximum(self._recorded.slowest_ns(played), least)
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
    ranks = _ranks_of(stages)
    saved = search.saved(at_other_stages_pace(search.programs, stages), ranks)
    if saved is None:
        return None
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


def _at_once(hits: Bool) -> float:
    """Of the steps (columns) in which any rank (line) is hit, the mean share of the ranks that are."""
    return float(hits[:, hits.any(axis=0)].mean())
