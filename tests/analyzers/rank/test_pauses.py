"""Pauses of hosts by the ranges that a script has named."""

from __future__ import annotations

import numpy as np

from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.pauses import by_range
from tests.traces import MAIN, TraceBuilder

MS = 1_000_000


def named(builder: TraceBuilder, *pauses: tuple[int, int]) -> dict[str, float]:
    """Name -> its ms of these pauses, given in ms."""
    edges = np.array(pauses, dtype=np.int64) * MS
    trace = builder.op("aten::mm", 0, 1).build()
    found = by_range(trace, Intervals.of(edges[:, 0], edges[:, 1]), np.array([MAIN]))
    return {name: part.measure() / MS for name, part in found.items()}


def test_ranges_in_one_pause_have_their_parts_of_it() -> None:
    """Nothing runs between a read of 12 ms and an audit of 5; 3 ms of it belong to neither."""
    builder = TraceBuilder().note("read", MS, 13 * MS).note("audit", 14 * MS, 19 * MS)
    assert named(builder, (0, 20)) == {"read": 12, "audit": 5}


def test_a_range_that_lasts_for_the_whole_pause_has_it() -> None:
    builder = TraceBuilder().note("fetch", 0, 20 * MS).note("socket", 5 * MS, 15 * MS)
    assert named(builder, (0, 20)) == {"fetch": 20}


def test_of_ranges_in_a_part_of_it_the_inner_one_has_its_own() -> None:
    builder = TraceBuilder().note("fetch", 0, 20 * MS).note("socket", 5 * MS, 15 * MS)
    assert named(builder, (0, 30)) == {"socket": 10, "fetch": 10}


def test_a_range_in_which_the_host_goes_on_is_about_something_else() -> None:
    """A whole epoch holds the pause and 80 ms of work."""
    builder = TraceBuilder().note("epoch", 0, 100 * MS).note("DistributedDataParallel.forward", 0, 20 * MS)
    assert named(builder, (0, 20)) == {}


def test_short_ranges_are_no_places() -> None:
    builder = TraceBuilder()
    for number in range(10):
        builder.note("tick", number * MS // 10, (number + 1) * MS // 10)
    assert named(builder, (0, 1)) == {}
