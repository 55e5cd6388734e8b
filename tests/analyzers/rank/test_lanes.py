"""Lanes by hand: which events a rank's picture of one step shows, how short ones are merged, how ranks are aligned."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfscope.analyzers.job.aligned import AlignedJob, align_job
from perfscope.analyzers.job.lanes import MOST_RANKS, chosen_ranks, lanes, step_timelines
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.lanes import FINEST, LONGEST_NAME, MOST_EVENTS
from perfscope.analyzers.rank.partial import RankLanes
from perfscope.trace.trace import Trace
from tests.traces import TraceBuilder

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
STEP = 1_000_000
LONG = "cutlass::Kernel<" + "x" * 10_000 + ">"


def gpu_rank(rank: int = 0, *, late: int = 0, ranks: int = 2, kernels: Sequence[tuple[int, int]] = ()) -> Trace:
    """Three steps; in each a product, ``kernels`` (start, end), a copy and an all-reduce that begins ``late``."""
    builder = TraceBuilder(rank=rank, world_size=ranks)
    group = {
        "kind": "allreduce", "group": "0", "ranks": json.dumps(list(range(ranks))), "dtype": "Float",
        "elements_in": 500, "elements_out": 500, "group_size": ranks,
    }  # fmt: skip
    for number in range(3):
        at = number * STEP
        builder.step(number, at, at + STEP)
        builder.op("aten::mm", at + 5_000, at + 30_000)
        builder.launched(LONG, at + 10_000, at + 40_000, at + 200_000)
        for start, end in kernels:
            builder.launched("small", at + 31_000, at + start, at + end)
        builder.launched(NCCL, at + 32_000, at + 400_000 + late, at + 800_000, stream=20, collective=group)
    return builder.build()


def compared(*traces: Trace) -> AlignedJob:
    partials = [analyze_rank(trace) for trace in traces]
    return align_job({partial.rank: partial for partial in partials if partial.rank is not None})


def of_kind(own: RankLanes, kind: str) -> list[tuple[int, int, int]]:
    """(start from the step's, end, pieces) of one lane."""
    for lane in own.lanes:
        if lane.kind == kind:
            start, end = lane.start_ns - own.start_ns, lane.end_ns - own.start_ns
            return list(zip(start.tolist(), end.tolist(), lane.pieces.tolist(), strict=True))
    return []


def test_the_middle_step_has_operators_and_shortened_names() -> None:
    own = analyze_rank(gpu_rank()).lanes
    assert own.step == 1
    assert of_kind(own, "compute") == [(40_000, 200_000, 1)]
    (compute,) = (lane for lane in own.lanes if lane.kind == "compute")
    assert own.texts[compute.operator[0]] == "aten::mm"
    assert own.texts[compute.name[0]] == LONG[:LONGEST_NAME]


def test_runs_of_short_kernels_are_one_entry_that_knows_how_full_it_is() -> None:
    short = STEP // FINEST // 2
    first = [(300_000 + index * 2 * short, 300_000 + index * 2 * short + short) for index in range(10)]
    own = analyze_rank(gpu_rank(kernels=first)).lanes
    start, end, pieces = of_kind(own, "compute")[1]
    assert (start, end, pieces) == (300_000, 300_000 + 19 * short, 10)
    (compute,) = (lane for lane in own.lanes if lane.kind == "compute")
    assert compute.busy_ns.tolist()[1] == 10 * short


@given(st.lists(st.tuples(st.integers(40_000, 390_000), st.integers(1, 2_000)), max_size=600))
def test_merging_loses_no_time_and_no_event(starts: list[tuple[int, int]]) -> None:
    kernels = [(start, start + length) for start, length in starts]
    own = analyze_rank(gpu_rank(kernels=kernels)).lanes
    (compute,) = (lane for lane in own.lanes if lane.kind == "compute")
    assert len(compute) <= MOST_EVENTS
    assert int(compute.pieces.sum()) == len(kernels) + 1
    assert int(compute.busy_ns.sum()) == 160_000 + sum(end - start for start, end in kernels)
    assert (np.diff(compute.start_ns) >= 0).all()


def test_without_a_device_the_main_threads_operators_are_the_computation() -> None:
    builder = TraceBuilder(rank=0, world_size=1)
    for number in range(3):
        at = number * STEP
        builder.step(number, at, at + STEP)
        builder.op("aten::linear", at + 10_000, at + 500_000)
        builder.op("aten::addmm", at + 20_000, at + 490_000)  # inside the other: not an entry of its own
        builder.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at + 600_000, at + 700_000)
    own = analyze_rank(builder.build()).lanes
    assert of_kind(own, "compute") == [(10_000, 500_000, 1)]
    assert of_kind(own, "loader") == [(600_000, 700_000, 1)]


def test_phases_and_own_ranges_have_lanes_and_the_whole_steps_range_has_none() -> None:
    """On a device a phase lasts from its first kernel to its last: here 40 to 200, launched at 10."""
    builder = TraceBuilder(rank=0, world_size=1)
    for number in range(3):
        at = number * STEP
        builder.step(number, at, at + STEP)
        builder.note("my step", at, at + 950_000)
        builder.note("perfscope::forward", at + 5_000, at + 30_000)
        builder.note("my loss", at + 21_000, at + 25_000)
        builder.note("inside", at + 22_000, at + 24_000)
        builder.launched("small", at + 10_000, at + 40_000, at + 200_000)
    own = analyze_rank(builder.build()).lanes
    assert of_kind(own, "phase") == [(40_000, 200_000, 1)]
    assert of_kind(own, "range") == [(21_000, 25_000, 1)]


def test_without_a_device_time_outside_operators_is_the_hosts() -> None:
    builder = TraceBuilder(rank=0, world_size=1)
    for number in range(4):
        at = number * STEP
        builder.step(number, at, at + STEP)
        builder.note("perfscope::forward", at, at + 700_000)
        builder.op("aten::linear", at, at + 300_000)
        builder.op("aten::mm", at + 700_000, at + STEP)
    found = {lane.kind: lane for lane in lanes(compared(builder.build()))}
    assert found["host"].start_us == (300.0,)
    assert found["host"].duration_us == (400.0,)
    assert found["phase"].duration_us == (700.0,)


def test_a_collective_is_split_where_the_last_rank_arrived() -> None:
    found = lanes(compared(gpu_rank(0), gpu_rank(1, late=100_000)))
    early, late = (lane for lane in found if lane.kind == "communication")
    assert (early.rank, late.rank) == (0, 1)
    assert early.wait_us == (pytest.approx(100.0),)
    assert late.wait_us == (0.0,)
    assert (early.waited_for, late.waited_for) == ((1,), (1,))
    assert early.bytes == (2000,)
    assert early.start_us[0] + 100.0 == pytest.approx(late.start_us[0])
    assert early.texts[early.name[0] or 0] == "all_reduce"


def test_alone_a_rank_claims_no_wait() -> None:
    (only,) = (lane for lane in lanes(compared(gpu_rank(0))) if lane.kind == "communication")
    assert only.wait_us == (None,)


def test_of_many_ranks_the_wanted_ones_are_shown_in_both_pictures() -> None:
    result = compared(*(gpu_rank(rank, late=50_000 * (rank == 11), ranks=20) for rank in range(20)))
    shown = {lane.rank for lane in lanes(result, (11,))}
    assert len(shown) == MOST_RANKS
    assert {11, result.last} <= shown
    assert {lane.step for lane in lanes(result)} == {timeline.step for timeline in step_timelines(result)}


@given(st.sets(st.integers(0, 500), min_size=1), st.lists(st.integers(0, 600)), st.integers(2, 64))
def test_a_choice_of_ranks_is_of_them_and_no_more_than_asked(ranks: set[int], wanted: list[int], most: int) -> None:
    chosen = chosen_ranks(sorted(ranks), wanted, most)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= ranks
    assert len(chosen) == min(most, len(ranks))
    first = [rank for rank in dict.fromkeys(wanted) if rank in ranks][: most // 2]
    assert set(first) <= set(chosen)
