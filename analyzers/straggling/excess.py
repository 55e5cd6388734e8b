"""By how much ranks' own time exceeds that of ranks that do the same work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

import numpy as np

from perfscope.analyzers.replay.pace import Peers
from perfscope.analyzers.replay.programs import Recorded
from perfscope.medians import SIGMA_OF_MAD
from perfscope.trace import Int64

NOISE: Final = 0.02
"""Share of the step below which a loss is not told from noise."""

_IN_TURN: Final = 4.0
"""How many times its usual distance the slowest rank of a step must lie above the median to be hit by something: the
slowest of many ranks is always slower than the median, pauses are not of that size."""


def own_in_step(recorded: Recorded, peers: Peers) -> Int64:
    """Own time of each rank (lines) in each used step (columns)."""
    steps = np.flatnonzero(recorded.used)
    return np.stack([peers.own_ns[:, peers.step == step].sum(axis=1) for step in steps], axis=1)


def excess(peers: Peers, own: Int64) -> dict[int, Int64]:
    """By how much each rank's own time exceeds its peers' median in each used step; it is no peer of its own."""
    order = np.sort(own, axis=0)
    place = np.empty(own.shape, dtype=np.int64)
    np.put_along_axis(place, np.argsort(own, axis=0, kind="stable"), np.arange(len(own))[:, None], axis=0)
    left = len(own) - 1

    def remaining(index: int) -> Int64:
        """What is at this place of the order once a rank is taken out of it, for each rank."""
        return np.asarray(np.where(place > index, order[index], order[index + 1]), dtype=np.int64)

    middle = (remaining((left - 1) // 2) + remaining(left // 2)) // 2
    return {rank: own[index] - middle[index] for index, rank in enumerate(peers.ranks)}


def excess_apart(peers: Peers, own: Int64, ranks: Collection[int]) -> dict[int, Int64]:
    """The same for those of ``ranks`` that are among these peers, against those that are not; empty without any."""
    mine = np.isin(peers.ranks, list(ranks))
    if mine.all() or not mine.any():
        return {}
    over = own[mine] - np.median(own[~mine], axis=0).astype(np.int64)
    return dict(zip(np.array(peers.ranks)[mine].tolist(), over, strict=True))


def most_apart(peers: Peers, own: Int64, hosts: Mapping[int, str]) -> dict[int, Int64]:
    """At least what ``excess_apart`` says of each rank against those of other hosts, quickly for all of them.

    Of n sorted values, k of which are taken out, the middle one of the rest lies no lower than place (n - k - 1) // 2.
    """
    names = [hosts.get(rank, "") for rank in peers.ranks]
    on_host = Counter(names)
    order = np.sort(own, axis=0)
    return {
        rank: own[index] - order[max(len(own) - on_host[names[index]] - 1, 0) // 2]
        for index, rank in enumerate(peers.ranks)
    }


def struck(peers: Peers, own: Int64) -> list[int]:
    """Ranks that were the slowest of some used step, and far slower than ranks usually differ."""
    distance = own - np.median(own, axis=0)
    usual = float(np.median(np.abs(distance))) * SIGMA_OF_MAD
    hit = (distance > _IN_TURN * usual) & (distance > NOISE * float(np.median(own)))
    return [peers.ranks[index] for index in np.unique(own.argmax(axis=0)[hit.any(axis=0)])]
