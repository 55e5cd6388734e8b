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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.replay.engine import Played, play
from perfscope.analyzers.replay.pace import Peers, at_peers_pace, find_peers
from perfscope.analyzers.replay.programs import Recorded
from perfscope.analyzers.timeline import Row
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

_IN_TURN: Final = 4.0
"""How many times its usual distance the slowest rank of a step must lie above the median to be hit by something: the
slowest of many ranks is always slower than the median, pauses are not of that size."""


@dataclass(frozen=True, eq=False)
class Lateness:
    """What some ranks cost the job: ``lost_ns`` per step, ``per_step_ns`` in each used step, and the main cause.

    ``scope`` and ``ranks`` are as in ``StragglerRow``; ``rank`` is the one of them with the most time over its peers.
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
    groups = [peers for peers in find_peers(result, recorded) if len(peers.ranks) > 1]
    if not groups or not base.complete:
        return ()
    return _Search(recorded, base, groups, hosts).run()


class _Search:
    """Tries cures and keeps what they save."""

    def __init__(self, recorded: Recorded, base: Played, groups: Sequence[Peers], hosts: Mapping[int, str]) -> None:
        self._recorded = recorded
        self._slowest_ns = recorded.slowest_ns(base)
        self._step_ns = float(self._slowest_ns.mean())
        self._peers = {rank: peers for peers in groups for rank in peers.ranks}
        self._hosts = hosts
        self._excess = {rank: excess for peers in groups for rank, excess in _excess(recorded, peers).items()}
        over = {rank: float(np.maximum(excess, 0).mean()) for rank, excess in self._excess.items()}
        self._slow = [rank for rank in sorted(over, key=lambda rank: -over[rank]) if over[rank] >= self._noise]

    @property
    def _noise(self) -> float:
        return NOISE * self._step_ns

    def run(self) -> tuple[Lateness, ...]:
        """Single ranks, then hosts in place of their ranks, then ranks that take turns."""
        found = [late for rank in self._slow[:_CANDIDATES] if (late := self._cured((rank,), "rank")) is not None]
        for members in self._slow_hosts():
            late = self._cured(members, "host")
            alone = [other.lost_ns for other in found if other.rank in members]
            if late is not None and late.lost_ns >= _TOGETHER * max(alone, default=0.0):
                found = [other for other in found if other.rank not in members]
                found.append(late)
        if not found:
            found += self._in_turn()
        return tuple(sorted(found, key=lambda late: (-late.lost_ns, late.rank)))

    def _slow_hosts(self) -> list[tuple[int, ...]]:
        """The slow ranks of each host most of whose ranks are slow, where there are other hosts to compare with."""
        members: dict[str, list[int]] = {}
        for rank in self._peers:
            members.setdefault(self._hosts.get(rank, ""), []).append(rank)
        members.pop("", None)
        if len(members) < 2:
            return []
        slow = set(self._slow)
        return [
            tuple(rank for rank in ranks if rank in slow)
            for ranks in members.values()
            if len(slow.intersection(ranks)) >= max(2, len(ranks) / 2)
        ]

    def _cured(self, ranks: tuple[int, ...], scope: str) -> Lateness | None:
        """What these ranks cost together; None where that is no more than noise."""
        played = play(at_peers_pace(self._recorded, self._peers, ranks))
        saved = self._slowest_ns - self._recorded.slowest_ns(played)
        lost = _mean_loss(saved, self._recorded.used)
        if not played.complete or lost < self._noise:
            return None
        worst = max(ranks, key=lambda rank: (float(self._excess[rank].sum()), -rank))
        return Lateness(worst, tuple(sorted(ranks)), scope, self._cause(ranks), lost, np.maximum(saved, 0))

    def _cause(self, ranks: Sequence[int]) -> str:
        """The category in which these ranks exceed their peers most, over the used steps."""
        total = np.zeros(len(Row), dtype=np.float64)
        for rank in ranks:
            peers = self._peers[rank]
            excess = peers.excess_ns(rank, ranks)
            if excess is not None:
                total += excess[self._recorded.used[peers.step]].sum(axis=0)
        return CAUSES[Row(int(_OWN[np.argmax(total[_OWN])]))]

    def _in_turn(self) -> list[Lateness]:
        """Pauses that strike now this rank, now that one: no single rank costs much, all of them together do."""
        struck = [rank for peers in set(self._peers.values()) for rank in _struck(self._recorded, peers)]
        if len(set(struck)) < 2:
            return []
        late = self._cured(tuple(sorted(set(struck))), "job")
        return [late] if late is not None else []


def _mean_loss(saved_ns: Int64, used: Bool) -> float:
    """Mean of what each used step would take less.

    Ranks do not begin a recording together, and that skew is nobody's fault: where no step before the first used one
    was recorded, a loss in that one alone is no evidence.
    """
    if len(saved_ns) > 1 and used[0] and saved_ns[1:].sum() <= 0:
        return 0.0
    return float(saved_ns.mean())


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
    """Ranks that some step found far slower than ranks usually differ."""
    own = _own_in_step(recorded, peers)
    distance = own - np.median(own, axis=0)
    usual = float(np.median(np.abs(distance))) * 1.4826  # the median absolute deviation as a standard deviation
    window = float(np.median(own))
    hit = (distance > _IN_TURN * usual) & (distance > NOISE * window)
    return [peers.ranks[index] for index in np.unique(np.argmax(own, axis=0)[hit.any(axis=0)])]
