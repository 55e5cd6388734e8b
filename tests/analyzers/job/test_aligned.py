"""Ranks side by side, against answers worked out by hand."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from perfscope.analyzers.job.aligned import AlignedJob, align_job, job_windows, time_breakdowns
from perfscope.analyzers.job.collectives.cost_model import cost_models, cost_rows
from perfscope.analyzers.job.collectives.table import collective_rows
from perfscope.analyzers.job.critical_path import critical_path, walk
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.replay.engine import replay
from perfscope.analyzers.replay.schedules import record_schedules
from perfscope.analyzers.replay.stragglers.search import find_stragglers
from perfscope.analyzers.replay.stragglers.straggler import Straggler
from perfscope.results.categories import TimeCategory
from perfscope.results.rows import CollectiveRow
from perfscope.trace.trace import ProcessGroup
from tests.traces import RUNLOOP, RUNLOOP_2, TraceBuilder

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
STEP = 10_000
US = 1_000


def described(elements: int, ranks: tuple[int, ...] = (0, 1), sequence: int | None = None, **other: object) -> dict:
    return {
        "kind": "allreduce", "group": "0", "ranks": json.dumps(list(ranks)), "dtype": "BFloat16",
        "elements_in": elements, "elements_out": elements, "group_size": len(ranks), "sequence": sequence, **other,
    }  # fmt: skip


def compared(*builders: TraceBuilder, first_step: int | None = None) -> AlignedJob:
    partials = [analyze_rank(builder.build()) for builder in builders]
    return align_job({partial.rank: partial for partial in partials}, first_step)


def rows_of(result: AlignedJob) -> tuple[CollectiveRow, ...]:
    return collective_rows(result.matched, result.steps)


def lateness(result: AlignedJob) -> tuple[Straggler, ...]:
    recorded = record_schedules(result)
    return find_stragglers(result, recorded, replay(recorded.schedules), {})


def gpu_rank(rank: int, arrival: int, end: int, steps: int = 6, work_until: int | None = None) -> TraceBuilder:
    """Every step: compute from 100 to ``work_until``, one all-reduce from ``arrival`` to ``end``, compute to 9900, for
    which the host waits.
    """
    builder = TraceBuilder(rank=rank, world_size=2)
    for number in range(steps):
        at = number * STEP
        builder.step(number, at, at + STEP)
        builder.launched("gemm", at + 10, at + 100, at + (arrival if work_until is None else work_until))
        builder.launched(NCCL, at + 20, at + arrival, at + end, stream=20, collective=described(500))
        builder.launched("adam", at + 30, at + end, at + 9900)
        builder.call("cudaDeviceSynchronize", at + 40, at + 9900)
    return builder


def test_the_job_s_steps_are_periods_of_all_ranks_together():
    """Two steps of 40. Rank 0 begins 10 earlier and waits; rank 1 saves for 5 after the last, which rank 0 does not::

    rank 0   0 [           50)[        90)
    rank 1        10 [     50)[             95)
    job           10 [     50)[             95)
    """
    ranks = []
    for rank, edges in enumerate(((0, 50, 90), (10, 50, 95))):
        builder = TraceBuilder(rank=rank, world_size=2)
        for number in range(2):
            begin, end = edges[number : number + 2]
            builder.step(number, begin, end).launched("gemm", begin + 1, begin + 2, 49 + 40 * number)
            builder.launched(NCCL, begin + 3, 49 + 40 * number, 50 + 40 * number, collective=described(500))
            builder.call("cudaDeviceSynchronize", begin + 4, 50 + 40 * number)
        ranks.append(builder)
    result = compared(*ranks)
    begin, end = result.job_windows
    assert (begin.tolist(), end.tolist(), result.step_ns, result.last) == ([10, 50], [50, 95], 42.5, 1)
    assert [result.mean_step_ns(rank) for rank in (0, 1)] == [45, 42.5]
    recorded = record_schedules(result)
    assert recorded.steps_ns(replay(recorded.schedules)).tolist() == [40, 45]


def test_what_is_assumed_of_a_begin_counts_as_far_as_of_all_and_other_clocks_stand_alone():
    begin, end, aligned = np.array([[0, 50], [30, 50]]), np.array([[50, 90], [50, 95]]), np.ones(2, dtype=np.bool_)
    for assumed, first in (([0, 0], 30), ([0, 30], 0), ([0, 20], 10)):
        found, _ = job_windows(begin, end, np.array([[ns, 0] for ns in assumed]), aligned)
        assert found.tolist() == [first, 50]
    found, until = job_windows(begin, end, 0 * begin, np.array([True, False]))
    assert (found.tolist(), until.tolist()) == ([0, 50], [50, 90])


def test_waits_are_split_from_transfers_at_the_last_arrival():
    result = compared(gpu_rank(0, 1000, 5000), gpu_rank(1, 4000, 5000))
    assert result.totals[0][0, [TimeCategory.COMM_WAIT, TimeCategory.COMM_TRANSFER]].tolist() == [3000, 1000]
    assert result.totals[1][0, [TimeCategory.COMM_WAIT, TimeCategory.COMM_TRANSFER]].tolist() == [0, 1000]
    (row,) = rows_of(result)
    assert (row.kind, row.dtype, row.bytes, row.count) == ("all_reduce", "bfloat16", 1000, 6)
    assert (row.transfer_us, row.wait_us) == (1.0, 1.5)
    assert row.transfer_us_per_step == (1.0,) * 6
    assert [each.own_us_per_step[:2] for each in time_breakdowns(result)] == [(7.0, 7.0), (10.0, 10.0)]
    assert row.last_arriver == {1: 1.0}
    # 1000 bytes in 1000 ns; two ranks' all-reduce moves 2·(2-1)/2 = 1 times its size over the link.
    assert (row.algbw_gbps, row.busbw_gbps) == (1.0, 1.0)


def test_time_breakdowns_add_up_and_separate_overlapped_communication():
    result = compared(gpu_rank(0, 1000, 5000, work_until=2000), gpu_rank(1, 4000, 5000))
    first, second = time_breakdowns(result)
    first.self_check()
    second.self_check()
    # Rank 0 computes until 2000, so the first 1000 of its wait are hidden.
    assert first.hidden_comm_us == 1.0
    assert first.exposed_comm_wait_us == 2.0
    assert first.comm_us == 4.0


def test_the_late_rank_is_charged_with_what_made_it_late():
    result = compared(gpu_rank(0, 1000, 5000), gpu_rank(1, 4000, 5000))
    (late,) = lateness(result)
    assert (late.rank, late.cause) == (1, "compute")
    assert late.per_step_ns.tolist() == [3000] * 6


def test_a_step_before_the_first_used_one_serves_to_begin_together_only():
    result = compared(gpu_rank(0, 1000, 5000), gpu_rank(1, 4000, 5000), first_step=2)
    assert result.steps.tolist() == [2, 3, 4, 5]
    assert len(result.totals[0]) == 4
    assert sum(row.count for row in rows_of(result)) == 4
    (late,) = lateness(result)
    assert late.per_step_ns.tolist() == [3000] * 4


def test_the_skew_at_the_start_of_a_recording_is_nobodys_host_time():
    """One step. Rank 1 is recorded from 3990 on, computes until 5000 and is the last to arrive: what it did before is
    not known, and rank 0 waited for it from 1000 on.
    """
    ranks = [gpu_rank(0, 1000, 6000, steps=1), TraceBuilder(rank=1, world_size=2)]
    ranks[1].step(0, 3990, STEP).launched("gemm", 3995, 4000, 5000)
    ranks[1].launched(NCCL, 4010, 5000, 6000, stream=20, collective=described(500))
    ranks[1].launched("adam", 4020, 6000, 9900)
    result = compared(*ranks)
    (start,), (end,) = result.windows[0]
    segments = critical_path(result, int(start), int(end), 0)
    assert sum(segments.values()) == end - start
    assert segments[1, TimeCategory.COMPUTE] == 1000
    assert segments[1, TimeCategory.HOST] == 5
    assert segments[0, TimeCategory.COMM_WAIT] == 2990


def test_lost_time_is_what_the_next_slowest_leaves():
    ranks = [TraceBuilder(rank=rank, world_size=3).step(0, 0, STEP).step(1, STEP, 2 * STEP) for rank in range(3)]
    for step in (0, STEP):
        for builder, arrival in zip(ranks, (1000, 3000, 4000), strict=True):
            builder.launched("gemm", step + 10, step + 100, step + arrival)
            builder.launched(
                NCCL, step + 20, step + arrival, step + 5000, stream=20, collective=described(500, (0, 1, 2))
            )
            builder.launched("adam", step + 30, step + 5000, step + 9900)
            builder.call("cudaDeviceSynchronize", step + 40, step + 9900)
    result = compared(*ranks)
    (late,) = lateness(result)
    # Were rank 2 quicker, rank 1 would still hold the others until 3000: 1000 would be saved, not 3000.
    assert (late.rank, late.per_step_ns.tolist()) == (2, [1000, 1000])


def test_the_wait_for_a_collective_delayed_behind_another_is_attributed_to_the_rank_that_one_waited_for():
    """gloo with two threads: rank 0's third collective cannot start until its first, which waits for rank 1, is over.

    ::

    rank 0   thread A  [1000 ............ 6000)[6005 .. 6500)       rank 1 is late: it arrives at 5000
             thread B   [1500 ............... 6200)
    rank 1   thread A                  [5000 6000)[6000 . 6500)
             thread B                   [5100  6200)
    """
    ranks = [TraceBuilder(rank=rank, world_size=2) for rank in range(2)]
    for step in range(6):
        at = step * STEP
        for builder in ranks:
            builder.step(step, at * US, (at + STEP) * US)
        ranks[0].op("aten::mm", (at + 100) * US, (at + 1600) * US)
        ranks[1].op("aten::mm", (at + 3600) * US, (at + 5200) * US)
        for builder, times in zip(
            ranks, ([(1000, 6000), (1500, 6200), (6005, 6500)], [(5000, 6000), (5100, 6200), (6000, 6500)]), strict=True
        ):
            for (start, end), thread, size in zip(times, (RUNLOOP, RUNLOOP_2, RUNLOOP), (10, 20, 30), strict=True):
                shapes = {"shapes": [[size]], "types": ["float"]}
                builder.note("gloo:all_reduce", (at + start) * US, (at + end) * US, thread, **shapes)
    result = compared(*ranks)
    assert [row.bytes for row in sorted(rows_of(result), key=lambda row: row.bytes)] == [
        40,
        80,
        120,
    ]
    found = lateness(result)
    assert [(late.rank, late.cause) for late in found] == [(1, "host")]
    # At rank 0's pace rank 1 would come to the first collective at 1000: that ends at 2000 and the third, which waits
    # for it, at 2500 instead of 6500.
    assert found[0].per_step_ns.tolist() == [4000 * US] * 6


def test_clock_offsets_do_not_change_the_attribution():
    shifted = gpu_rank(1, 4000, 5000)
    for event in shifted.events:
        event["start"] += 5_000_000
        event["end"] += 5_000_000
    result = compared(gpu_rank(0, 1000, 5000), shifted)
    assert result.clocks.offset_ns.tolist() == [0, -5_000_000]
    assert result.totals[0][0, TimeCategory.COMM_WAIT] == 3000
    (late,) = lateness(result)
    assert late.rank == 1


def test_the_critical_path_adds_up_and_goes_through_the_late_rank():
    result = compared(gpu_rank(0, 1000, 5000), gpu_rank(1, 4000, 5000))
    start, end = 100, 9900
    segments = critical_path(result, start, end, 0)
    assert sum(segments.values()) == end - start
    # From rank 0's end back to the all-reduce, through it, then along rank 1, which was waited for.
    assert segments == {
        (0, TimeCategory.COMPUTE): 4900,
        (0, TimeCategory.COMM_TRANSFER): 1000,
        (1, TimeCategory.COMPUTE): 3900,
    }


def by_the_moment(result: AlignedJob, start: int, end: int, rank: int) -> dict[tuple[int, TimeCategory], int]:
    """The critical path of two ranks, on clocks that differ by their offsets: one ns at a time."""
    path: Counter[tuple[int, TimeCategory]] = Counter()
    offsets = dict(zip(result.clocks.ranks.tolist(), result.clocks.offset_ns.tolist(), strict=True))
    categories = {}
    for each, timeline in result.timelines.items():
        lengths = np.diff([*timeline.start_ns.tolist(), int(timeline.end_ns)])
        moments = zip(
            range(int(timeline.start_ns[0]), int(timeline.end_ns)), np.repeat(timeline.category, lengths), strict=True
        )
        categories[each] = {moment + offsets[each]: TimeCategory(int(category)) for moment, category in moments}
    for moment in range(end - 1, start - 1, -1):
        if categories[rank].get(moment) is TimeCategory.COMM_WAIT:
            rank = 1 - rank
        path[rank, categories[rank].get(moment, TimeCategory.HOST)] += 1
    return dict(path)


@pytest.mark.parametrize("offset", [0, 5_000_000])
@pytest.mark.parametrize(("start", "end", "last"), [(0, 59_900, 0), (12_345, 54_321, 1), (4_500, 4_501, 0)])
def test_the_critical_path_is_that_of_every_moment(offset: int, start: int, end: int, last: int):
    late = gpu_rank(1, 4000, 5000)
    for event in late.events:
        event["start"] += offset
        event["end"] += offset
    result = compared(gpu_rank(0, 1000, 5000), late)
    assert critical_path(result, start, end, last) == by_the_moment(result, start, end, last)


@pytest.mark.parametrize("drift", [0.3, -0.3, 1e-4])
def test_the_critical_path_adds_up_where_clocks_tell_moments_apart_and_where_not(drift: float):
    result = compared(gpu_rank(0, 1000, 5000), gpu_rank(1, 4000, 5000))
    clocks = replace(result.clocks, drift=np.array([0.0, drift]))
    result = replace(result, clocks=clocks)
    segments = list(walk(result, 100, 9900, 0))
    assert [(each.end_ns, each.start_ns) for each in segments] == list(
        pairwise([9900, *(each.start_ns for each in segments)])
    )
    assert segments[-1].start_ns == 100
    path: Counter[tuple[int, TimeCategory]] = Counter()
    for rank, category, start, end in segments:
        path[rank, category] += end - start
    assert critical_path(result, 100, 9900, 0) == path


def test_a_missing_participant_makes_the_split_a_bound():
    ranks = (0, 1, 2)
    builders = [TraceBuilder(rank=rank, world_size=3).step(0, 0, STEP) for rank in (0, 1)]
    for builder, arrival in zip(builders, (1000, 2000), strict=True):
        builder.launched("gemm", 10, 100, 900)
        builder.launched(NCCL, 20, arrival, 5000, stream=20, collective=described(500, ranks))
    result = compared(*builders)
    # The transfer takes at most the shortest duration present, 3000: rank 0 waited for at least 1000.
    assert result.totals[0][0, [TimeCategory.COMM_WAIT, TimeCategory.COMM_TRANSFER]].tolist() == [1000, 3000]
    assert all(row.wait_is_bound for row in time_breakdowns(result))
    (row,) = rows_of(result)
    assert not row.complete
    assert row.last_arriver == {}


def test_one_participant_gives_no_wait_and_no_bandwidth():
    builder = TraceBuilder(rank=0, world_size=2).step(0, 0, STEP)
    builder.launched("gemm", 10, 100, 900).launched(NCCL, 20, 1000, 5000, stream=20, collective=described(500))
    (row,) = rows_of(compared(builder))
    assert (row.wait_us, row.algbw_gbps, row.busbw_gbps) == (None, None, None)


def rank_with_sizes(
    rank: int, sizes: list[int], sequences: list[int] | None = None, kind: str = "allreduce"
) -> TraceBuilder:
    builder = TraceBuilder(rank=rank, world_size=2).step(0, 0, STEP)
    builder.launched("gemm", 5, 10, 90)
    for number, size in enumerate(sizes):
        start = 100 + 1000 * number
        sequence = None if sequences is None else sequences[number]
        collective = described(size, sequence=sequence, kind=kind)
        builder.launched(NCCL, start - 50, start, start + 500, stream=20, collective=collective)
    return builder


def test_recorded_sequence_numbers_win_over_order():
    # Rank 1's recording lacks the first collective.
    result = compared(rank_with_sizes(0, [10, 10, 10], [7, 8, 9]), rank_with_sizes(1, [10, 10], [8, 9]))
    present = dict(zip(*np.unique(result.matched.instance, return_counts=True), strict=True))
    assert sorted(present.values()) == [1, 2, 2]
    assert result.mismatches == ()


def test_a_pair_started_in_either_order_is_matched_by_size():
    result = compared(rank_with_sizes(0, [10, 20, 30]), rank_with_sizes(1, [20, 10, 30]))
    assert result.mismatches == ()
    rows = rows_of(result)
    assert sorted((row.bytes, row.count) for row in rows) == [(20, 1), (40, 1), (60, 1)]


def test_an_extra_collective_is_reported_not_papered_over():
    result = compared(rank_with_sizes(0, [10, 20, 20]), rank_with_sizes(1, [10, 20]))
    (mismatch,) = result.mismatches
    assert "rank 0: 2, rank 1: 1" in mismatch.text


def test_uneven_sizes_are_matched_in_order_where_they_may_differ():
    uneven = [
        rank_with_sizes(0, [10, 21, 30], kind="all_to_allv"),
        rank_with_sizes(1, [12, 20, 33], kind="all_to_allv"),
    ]
    result = compared(*uneven)
    assert result.mismatches == ()
    assert (np.bincount(result.matched.instance) == 2).all()


def test_groups_of_the_same_name_but_other_ranks_do_not_mix():
    """Tensor-parallel pairs: both halves of the job call their group by the same name."""
    builders = []
    for rank in range(4):
        builder = TraceBuilder(rank=rank, world_size=4).step(0, 0, STEP)
        pair = (0, 1) if rank < 2 else (2, 3)
        builder.launched("gemm", 5, 10, 90)
        builder.launched(NCCL, 20, 100 + 100 * rank, 1000, stream=20, collective=described(10, pair))
        builders.append(builder)
    rows = rows_of(compared(*builders))
    assert sorted((row.ranks, tuple(row.last_arriver)) for row in rows) == [((0, 1), (1,)), ((2, 3), (3,))]


def test_cost_model_recovers_latency_and_bandwidth():
    """t = 50 us + S / (2 GB/s) on two ranks, whose all-reduce factor is 1."""
    builders = [TraceBuilder(rank=rank, world_size=2).step(0, 0, 10_000_000) for rank in range(2)]
    for builder in builders:
        builder.launched("gemm", 5, 10, 90)
        at = 100
        for elements in (1000, 50_000, 200_000, 1000):
            took = 50_000 + elements  # 2 bytes an element, 0.5 ns a byte
            builder.launched(NCCL, at - 50, at, at + took, stream=20, collective=described(elements))
            at += took + 1000
    result = compared(*builders)
    (row,) = cost_rows(cost_models(result.matched), result.matched.instances)
    assert row.alpha_us == pytest.approx(50.0)
    assert row.busbw_gbps == pytest.approx(2.0)
    assert row.residual == pytest.approx(0.0, abs=1e-9)


def test_collectives_of_an_unknown_group_are_not_compared():
    builders = []
    for rank in range(2):
        groups = (ProcessGroup("0", "", (0, 1)), ProcessGroup("1", "", (rank, rank + 2)))
        builder = TraceBuilder(rank=rank, world_size=4, groups=groups).step(0, 0, STEP).op("aten::mm", 10, 50)
        builder.note("gloo:all_reduce", 100, 500, RUNLOOP)
        builders.append(builder)
    result = compared(*builders)
    assert len(result.matched.instances) == 2
    assert not result.matched.instances.complete.any()
