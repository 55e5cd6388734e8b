"""Own time of ranks that do the same work, cut at the same points: of ranks built by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from perfscope.analyzers.job.aligned import AlignedJob, align_job
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.replay.engine import replay
from perfscope.analyzers.replay.pace import at_peers_pace
from perfscope.analyzers.replay.peers import Peers, find_peers
from perfscope.analyzers.replay.schedules import RecordedSchedules, record_schedules
from perfscope.results.categories import TimeCategory
from tests.traces import TraceBuilder

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
WORK = {"a": 3000, "b": 500, "c": 700, "d": 900}
STEP = 20_000


def collective(group: str, ranks: Sequence[int]) -> dict[str, object]:
    return {
        "kind": "allreduce", "group": group, "ranks": json.dumps(list(ranks)), "dtype": "BFloat16",
        "elements_in": 500, "elements_out": 500, "group_size": len(ranks), "sequence": None,
    }  # fmt: skip


def racing(
    orders: Sequence[str], factor: dict[int, float], steps: int = 5, early: tuple[int, int] | None = None
) -> tuple[AlignedJob, RecordedSchedules]:
    """Every rank (an item of ``orders``) computes the pieces of work in its order; each is followed by an all-reduce of
    a group of its own, and once all have ended by the optimizer. ``early``: rank and step whose first all-reduce is
    issued before the step begins.
    """
    ranks = range(len(orders))
    builders = [TraceBuilder(rank=rank, world_size=len(orders)) for rank in ranks]
    for number in range(steps):
        at = number * STEP
        for rank, (builder, order) in enumerate(zip(builders, orders, strict=True)):
            builder.step(number, at, at + STEP)
            now = at + 100
            for place, piece in enumerate(order):
                end = now + round(WORK[piece] * factor.get(rank, 1.0))
                launch = at + 10 + 2 * place
                builder.launched(f"gemm_{piece}", launch, now, end)
                issue = at - 30 if early == (rank, number) and place == 0 else launch + 1
                stream = 20 + ord(piece)
                builder.launched(
                    NCCL, issue, end, at + 19_000, stream=stream, collective=collective(piece, ranks), call_takes=0
                )
                now = end
            builder.launched("adam", at + 60, at + 19_000, at + STEP - 100)
    result = align_job({partial.rank: partial for partial in (analyze_rank(one.build()) for one in builders)})
    return result, record_schedules(result)


def anchored_instances(recorded: RecordedSchedules, peers: Peers) -> list[list[int]]:
    """The instance (or -1: a mark) at each anchor of each rank, but for the first and last."""
    schedules, found = recorded.schedules, []
    for rank, anchors in zip(peers.ranks, peers.anchors, strict=True):
        at = schedules.first[schedules.ranks.index(rank)] + anchors[1:-1]
        issues = schedules.kind[at] == 0
        operand = np.where(issues, schedules.operand[at], 0)
        found.append(np.where(issues, schedules.instance[operand], -1).tolist())
    return found


ORDERS = ("abcd", "bcad", "cabd", "dabc")


def test_segments_end_at_the_same_collectives_on_all_ranks_though_these_race() -> None:
    result, recorded = racing(ORDERS, {})
    (peers,) = find_peers(result, recorded)
    instances = anchored_instances(recorded, peers)
    assert all(mine == instances[0] for mine in instances)
    assert (np.diff(peers.anchors, axis=1) > 0).all()
    # "a", "b" or "a", "d" ...: no more than two come in the same order everywhere; the four steps' beginnings do.
    assert len(instances[0]) >= 5 + 4
    assert peers.own_ns.sum(axis=1).tolist() == peers.in_step_ns.sum(axis=1).tolist()


@pytest.mark.parametrize("slow", [0, 1, 2, 3])
def test_a_rank_at_the_pace_of_racing_peers_takes_as_long_as_they_do(slow: int) -> None:
    result, recorded = racing(ORDERS, {slow: 1.5})
    (peers,) = find_peers(result, recorded)
    own = peers.own_ns.sum(axis=1)
    others = [own[line] for line, rank in enumerate(peers.ranks) if rank != slow]
    assert min(others) * 0.999 <= peers.target_ns(slow, (slow,)).sum() <= max(others) * 1.001
    paced = at_peers_pace(recorded, dict.fromkeys(peers.ranks, peers), (slow,))
    assert (paced.own_ns >= 0).all()
    assert replay(paced).complete


def test_ranks_are_peers_though_one_issues_a_collective_before_its_step_begins() -> None:
    result, recorded = racing(("abcd",) * 3, {1: 1.5}, early=(1, 3))
    (peers,) = find_peers(result, recorded)
    assert peers.ranks == (0, 1, 2)
    typical = sum(WORK.values())
    excess = peers.in_step_ns[1] - peers.in_step_ns[0]
    assert excess.tolist() == pytest.approx([0.5 * typical] * 5, abs=0.02 * typical)


def peers_of(own_ns: Sequence[Sequence[int]], step: Sequence[int]) -> Peers:
    own = np.array(own_ns, dtype=np.int64)
    steps = max(step) + 1
    rows = np.zeros((len(own), steps, len(TimeCategory)), dtype=np.int64)
    anchors = np.tile(np.arange(-1, own.shape[1]), (len(own), 1))
    return Peers(tuple(range(len(own))), anchors, own, rows, np.array(step, dtype=np.int64))


def test_the_peers_pace_is_one_that_some_peer_has() -> None:
    """Every peer is slow in one segment of four: the segments' medians add up to 40, and each peer takes 70."""
    own = [[10, 10, 10, 10], [40, 10, 10, 10], [10, 40, 10, 10], [10, 10, 40, 10], [100, 100, 100, 100]]
    peers = peers_of(own[1:], [0, 0, 0, 0])
    assert peers.target_ns(3, (3,)).tolist() == [17, 17, 17, 17]
    # The same in steps of their own: no step is slow on most of them, but each takes 70 in all.
    peers = peers_of(own[1:], [0, 1, 2, 3])
    assert peers.target_ns(3, (3,)).sum() in (68, 69, 70)
    # All of them at a usual pace: none of the slow segments is left.
    assert peers_of(own[:4], [0, 1, 2, 3]).target_ns(1, (0, 1, 2, 3)).sum() == 40
