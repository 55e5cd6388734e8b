"""Clocks set by messages whose peers are not named: a pipeline simulated by hand, on two hosts whose clocks differ."""

from __future__ import annotations

import numpy as np
import pytest

from perfscope.trace.clock import align
from perfscope.trace.rhythm import OpenEnds

MS = 1_000_000


def pipeline(stages: int, microbatches: int, jitter_ns: int, offset: dict[int, int], steps: int = 3) -> OpenEnds:
    """Every micro-batch passes all stages forward, 1 ms each, then back, 2.3 ms each; ends on the ranks' own clocks.
    Messages between ranks whose clocks differ by nothing are left out: they are paired by their times.
    """
    dice = np.random.default_rng(3)
    lines = []
    for step in range(steps):
        for batch in range(microbatches):
            begin = step * 100 * MS + batch * 33 * MS // 10
            moments = [begin + MS * stage for stage in range(1, stages)]
            moments += [begin + MS * stages + 23 * MS // 10 * stage for stage in range(1, stages)]
            route = [(stage, stage + 1) for stage in range(stages - 1)]
            for (source, goal), moment in zip([*route, *((b, a) for a, b in route[::-1])], moments, strict=True):
                if offset[source] == offset[goal]:
                    continue
                end = moment + int(dice.integers(-jitter_ns, jitter_ns + 1))
                lines += [(source, step, 1, end + offset[source]), (goal, step, -1, end + 2000 + offset[goal])]
    rank, step, way, end = (np.array(column, dtype=np.int64) for column in zip(*lines, strict=True))
    return OpenEnds(
        rank=rank, group=np.zeros_like(rank), place=rank, step=step, way=way, bytes=np.full_like(rank, 64), end_ns=end
    )


def clocks_of(ends: OpenEnds, hosts: tuple[str, ...]):
    nothing = np.empty(0, dtype=np.int64)
    return align(np.arange(len(hosts)), nothing, nothing, nothing, hosts, None, ends)


@pytest.mark.parametrize("jitter", [0, 300_000])
def test_hosts_that_only_messages_without_peers_connect(jitter):
    """Also where the work never varies, so that messages of the next micro-batch are as far apart each time."""
    offset = {0: 0, 1: 0, 2: 7_654_321, 3: 7_654_321}
    clocks = clocks_of(pipeline(4, 8, jitter, offset), ("a", "a", "b", "b"))
    assert clocks.aligned.all()
    assert clocks.cluster.tolist() == [0, 0, 0, 0]
    assert np.abs(clocks.offset_ns + np.array([0, 0, 7_654_321, 7_654_321])).max() <= 5000


def test_the_next_host_alone_is_reached():
    """Stage 2 never talks to stage 0: it is left for later, when stage 1 is known."""
    offset = {0: 0, 1: -3 * MS, 2: 4 * MS}
    clocks = clocks_of(pipeline(3, 8, 200_000, offset), ("a", "b", "c"))
    assert clocks.aligned.tolist() == [True, True, False]
    assert abs(clocks.offset_of(1) - 3 * MS) <= 5000


def test_messages_without_a_rhythm_set_no_clock():
    """Ends at chance on both sides: no offset fits clearly more of them than any other."""
    found = pipeline(2, 8, 0, {0: 0, 1: 5 * MS})
    dice = np.random.default_rng(5)
    moved = np.where(found.rank == 1, dice.integers(0, 90 * MS, len(found)), found.end_ns)
    ends = OpenEnds(found.rank, found.group, found.place, found.step, found.way, found.bytes, moved)
    clocks = clocks_of(ends, ("a", "b"))
    assert clocks.aligned.tolist() == [True, False]
    assert clocks.offset_ns.tolist() == [0, 0]
