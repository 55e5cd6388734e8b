from __future__ import annotations

import numpy as np
import pytest

from perfscope.clock import Clocks, align


def aligned(ends: dict[int, dict[int, int]], hosts: tuple[str, ...] = ()) -> Clocks:
    """``ends``: instance -> rank -> end on that rank's own clock."""
    lines = [(instance, rank, end) for instance, by_rank in ends.items() for rank, end in by_rank.items()]
    instance, rank, end = (np.array(column, dtype=np.int64) for column in zip(*lines, strict=True))
    return align(np.unique(rank), instance, rank, end, hosts)


def test_example_of_the_docstring():
    clocks = aligned({0: {0: 100, 1: 5100}, 1: {0: 200, 1: 5204}})
    assert clocks.offset_ns.tolist() == [0, -5002]
    assert clocks.residual_ns.tolist() == [1, 1]


def test_one_late_end_in_many_does_not_count():
    ends = {i: {0: 1000 * i, 1: 1000 * i + 500} for i in range(9)} | {9: {0: 9000, 1: 9_000_000}}
    assert aligned(ends).offset_of(1) == -500


def test_offsets_pass_through_ranks_that_share_groups():
    """0-1 and 2-3 are one kind of group, 0-2 and 1-3 the other; no collective holds all four."""
    skew = {0: 0, 1: 700, 2: -300, 3: 5000}
    ends = {}
    for step in range(6):
        for number, group in enumerate([(0, 1), (2, 3), (0, 2), (1, 3)]):
            time = 10_000 * step + 1000 * number
            ends[4 * step + number] = {rank: time + skew[rank] for rank in group}
    clocks = aligned(ends)
    assert clocks.offset_ns.tolist() == [0, -700, 300, -5000]
    assert clocks.residual_ns.tolist() == [0, 0, 0, 0]


def test_a_rank_that_shares_nothing_keeps_its_clock_and_says_so():
    clocks = aligned({0: {0: 100, 1: 150}, 1: {0: 200, 1: 250}, 2: {2: 900, 3: 5000}})
    assert clocks.aligned.tolist() == [True, True, False, False]
    assert clocks.offset_ns.tolist()[2:] == [0, 0]
    assert clocks.residual_ns.tolist()[2:] == [-1, -1]


def test_an_offset_within_the_scatter_is_no_offset():
    noise = np.random.default_rng(0).integers(-2000, 2000, size=(50, 2))
    ends = {i: {0: 100_000 * i + int(a), 1: 100_000 * i + int(b)} for i, (a, b) in enumerate(noise)}
    assert aligned(ends).offset_of(1) == 0


@pytest.mark.parametrize(("apart", "offset"), [(400_000, 0), (5_000_000, -5_000_000)])
def test_ranks_of_one_host_share_a_clock_unless_far_apart(apart, offset):
    ends = {i: {0: 10_000_000 * i, 1: 10_000_000 * i + apart} for i in range(8)}
    assert aligned(ends, ("a", "a")).offset_of(1) == offset


def test_no_collectives_at_all():
    nothing = np.empty(0, dtype=np.int64)
    clocks = align(np.array([0, 1]), nothing, nothing, nothing)
    assert clocks.aligned.tolist() == [True, False]
    assert clocks.offset_ns.tolist() == [0, 0]
