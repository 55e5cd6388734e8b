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
    ("transfers_us", "ranks", "scope"),
    [
        ((100, 300, 300), (4, 5), "host"),  # most of the transfers are slow
        ((300, 300, 100), (2, 3), "host"),
        ((300, 100, 100), (0, 1), "host"),
        ((100, 300, 100), (2, 3, 4, 5), "link"),  # between two hosts: neither's
        ((100, 100, 100), None, None),
    ],
)
def test_the_host_all_of_whose_transfers_are_slow(
    transfers_us: tuple[int, int, int], ranks: tuple[int, ...] | None, scope: str | None
) -> None:
    link = found(*transfers_us)
    assert (link and link.ranks, link and link.scope) == (ranks, scope)


def test_its_transfers_would_take_what_the_others_do() -> None:
    link = found(100, 300, 300)
    assert link is not None
    assert sorted(np.round(link.factor, 3).tolist()) == [0.333] * 4 + [1.0] * 2


def of_groups(hosts: Mapping[int, str], *groups: tuple[tuple[int, ...], int]) -> SlowLink | None:
    """Groups of ranks, and what the same all-reduce takes in each, µs."""
    ranks = []
    for number, name in hosts.items():
        own: Mapping[str, tuple[int, ...]] = {str(group): group for group, _ in groups if number in group}
        rank = Rank(number, len(hosts), own, host=name)
        for group, took in groups:
            if number in group:
                rank.kernel("allreduce", str(group), 100 * US, (100 + took) * US, stream=20)
        ranks.append(rank)
    return slow_links(matched(ranks, hosts)[0], hosts)


ONE_HOST = dict.fromkeys(range(8), "a")
TWO_HOSTS = {rank: "ab"[rank // 4] for rank in range(8)}


@pytest.mark.parametrize(
    ("hosts", "groups", "ranks"),
    [
        (TWO_HOSTS, (((0, 4), 100), ((1, 5), 900), ((2, 6), 100), ((3, 7), 110)), (1, 5)),
        (TWO_HOSTS, (((0, 2, 4, 6), 100), ((1, 3, 5, 7), 250)), (1, 3, 5, 7)),
        (TWO_HOSTS, (((0, 2, 4, 6), 100), ((1, 3, 5, 7), 150)), None),  # of two, either may be the usual one
        (TWO_HOSTS, (((0, 1), 100), ((2, 3), 100), ((4, 5), 100), ((3, 4), 900)), None),  # between hosts
        (ONE_HOST, (((0, 1), 100), ((2, 3), 100), ((4, 5), 100), ((3, 4), 900)), (3, 4)),
        (ONE_HOST, (((0, 1), 100), ((2, 3), 900), ((4, 5), 900), ((6, 7), 100)), (2, 3, 4, 5)),
    ],
)
def test_a_slow_group_beside_quick_ones(
    hosts: Mapping[int, str], groups: tuple[tuple[tuple[int, ...], int], ...], ranks: tuple[int, ...] | None
) -> None:
    link = of_groups(hosts, *groups)
    assert (link and link.ranks) == ranks
    assert link is None or link.scope == "link"
