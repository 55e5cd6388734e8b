"""Whose link is slow, of pairs of ranks on hosts of two that reduce something of the same size, by hand."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from perfscope.analyzers.replay.stragglers.slow_links import SlowLink, slow_links
from tests.analyzers.job.collectives.matching_jobs import Rank, matched

US = 1_000


def found(*transfers_us: int) -> SlowLink | None:
    """Hosts in a row, a pipeline of two ranks each: what transfers take between each and the next."""
    pairs = {(2 * host + side, 2 * host + 2 + side): host for host in range(len(transfers_us)) for side in (0, 1)}
    hosts = {number: f"node{number // 2}" for number in range(2 * len(transfers_us) + 2)}
    ranks = []
    for number, name in hosts.items():
        own: Mapping[str, tuple[int, int]] = {str(pair): pair for pair in pairs if number in pair}
        rank = Rank(number, len(hosts), own, host=name)
        for group, pair in own.items():
            start = (100 + 400 * pairs[pair]) // 2 * US
            rank.kernel("allreduce", group, start, start + transfers_us[pairs[pair]] * US, stream=20 + pairs[pair])
        ranks.append(rank)
    return slow_links(matched(ranks, hosts)[0], hosts)


@pytest.mark.parametrize(
    ("transfers_us", "ranks"),
    [
        ((100, 300, 300), (4, 5)),  # most of the transfers are slow
        ((300, 300, 100), (2, 3)),
        ((300, 100, 100), (0, 1)),
        ((100, 300, 100), None),  # the link between two: neither host's
        ((100, 100, 100), None),
    ],
)
def test_the_host_all_of_whose_transfers_are_slow(
    transfers_us: tuple[int, int, int], ranks: tuple[int, int] | None
) -> None:
    link = found(*transfers_us)
    assert (link and link.ranks) == ranks
    assert link is None or link.scope == "host"


def test_its_transfers_would_take_what_the_others_do() -> None:
    link = found(100, 300, 300)
    assert link is not None
    assert sorted(np.round(link.factor, 3).tolist()) == [0.333] * 4 + [1.0] * 2
