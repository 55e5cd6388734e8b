"""A rank's own progress: which collective a training thread, or a device, waits for, of traces built by hand."""

from __future__ import annotations

import numpy as np
import pytest

from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import NEVER, NONE, Category
from tests.analyzers.job.collectives.matching_jobs import Rank
from tests.traces import AUTOGRAD, RUNLOOP, RUNLOOP_2, TraceBuilder

US = 1_000
MS = 1_000_000


def partial(*collectives: tuple[str, float, float, int]) -> RankPartial:
    """A thread that computes until 1 ms and from 5 to 9 ms; each collective has a name, begin, end (ms), thread."""
    builder = TraceBuilder(world_size=2).step(1, 0, 9 * MS).op("aten::mm", 0, MS).op("aten::mm", 5 * MS, 9 * MS)
    for name, begin, end, thread in collectives:
        builder.note(f"gloo:{name}", round(begin * MS), round(end * MS), thread)
    return analyze_rank(builder.build())


def test_a_thread_that_continues_just_before_a_collective_s_end_waited_for_it():
    found = partial(("all_reduce", 0.9, 5.3, RUNLOOP))
    (begin, end) = found.progress.blocked.start_ns, found.progress.blocked.end_ns
    assert (begin.tolist(), end.tolist()) == ([MS], [5 * MS])
    assert found.progress.blocker.tolist() == [0]


def test_a_thread_does_not_wait_for_a_collective_that_begins_after_it_continued():
    """``broadcast`` ends soon after the thread continues at 5 ms, but began then; ``all_reduce`` ran all the time."""
    found = partial(("all_reduce", 0.9, 8, RUNLOOP), ("broadcast", 5.1, 5.5, RUNLOOP_2))
    assert len(found.progress.blocked) == 0
    assert TimeCategory.HOST in found.progress.own.category.tolist()


def test_of_two_collectives_that_run_a_thread_waits_for_the_one_that_ends_first():
    found = partial(("all_reduce", 0.9, 8, RUNLOOP), ("broadcast", 1.1, 5.2, RUNLOOP_2))
    assert found.progress.blocked.end_ns.tolist() == [5 * MS]
    assert found.collectives.end_ns[found.progress.blocker].tolist() == [round(5.2 * MS)]


@pytest.mark.parametrize(("gap", "blocked"), [(1, []), (200, [(30_000, 30_150)])])
def test_a_collective_that_ends_between_two_queued_kernels_was_waited_for_only_if_these_are_far_apart(
    gap: int, blocked: list[tuple[int, int]]
) -> None:
    """Kernels of 999 µs with 1 µs between each and the next; one gap is 1 or 200 µs, and in it a collective ends."""
    builder = TraceBuilder(world_size=2).step(1, 0, 41_000 * US)
    for number in range(40):
        begin = 1_000 * number + (gap - 1 if number >= 30 else 0)
        builder.launched("gemm", 10 + 5 * number, begin * US + US, (begin + 1_000) * US)
    end = 30_000 * US + (US // 2 if gap == 1 else 150 * US)
    builder.launched("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 300, 25_000 * US, end, stream=30)
    found = analyze_rank(builder.build()).progress.blocked
    assert list(zip((found.start_ns // US).tolist(), (found.end_ns // US).tolist(), strict=True)) == blocked


def gathers(*starts: int) -> RankPartial:
    """Three units of one step, µs: each gather is launched, then the copy out of its buffer and the unit's compute. The
    device copies at 100, 300 and 500, for 10 each, and computes from there to the next; gathers begin at ``starts``.
    """
    rank = Rank(0, 2, {"0": (0, 1)})
    for unit, start in enumerate(starts):
        launch, begin = (10 + 9 * unit) * US, (100 + 200 * unit) * US
        rank.kernel("_allgather_base", "0", start * US, (start + 15) * US, launch=launch)
        rank.builder.launched("split", launch + 3 * US, begin, begin + 10 * US)
        rank.builder.launched("gemm", launch + 6 * US, begin + 10 * US, begin + 200 * US)
    return analyze_rank(rank.builder.build())


def test_a_gather_that_begins_as_an_earlier_copy_ends_waited_for_it() -> None:
    """The second gather is launched behind the first unit's compute, and needs only its copy: an event before that."""
    found = gathers(20, 111, 311).progress
    assert found.host is not None
    assert found.ready_ns.tolist()[1:] == [110 * US, 310 * US]
    assert found.host.behind_ns.tolist() == [NONE, 13 * US + 1, 22 * US + 1]


def test_a_gather_stays_behind_the_one_in_front_of_it_on_its_stream() -> None:
    """The second gather begins as work ends that was launched before the first one was issued, at 30 µs: the program
    does not issue it sooner than that one, whatever it waited for.
    """
    rank = Rank(0, 2, {"0": (0, 1)})
    rank.builder.launched("gemm", 5 * US, 10 * US, 100 * US)
    rank.kernel("_allgather_base", "0", 50 * US, 80 * US, launch=30 * US)
    rank.builder.launched("split", 33 * US, 100 * US, 110 * US)
    rank.builder.launched("gemm", 36 * US, 110 * US, 200 * US)
    rank.kernel("_allgather_base", "0", 101 * US, 120 * US, launch=40 * US)
    found = analyze_rank(rank.builder.build()).progress.host
    assert found is not None
    assert found.behind_ns.tolist() == [NONE, 30 * US + 1]


def test_a_gather_that_begins_as_soon_as_it_can_waited_for_nothing() -> None:
    """The second begins while the first unit computes, the third right behind the second."""
    found = gathers(20, 200, 216).progress
    assert found.host is not None
    assert found.host.behind_ns.tolist() == [NONE, NONE, NONE]


def test_what_a_hook_does_to_reduce_a_bucket_is_part_of_issuing_it() -> None:
    """Autograd's function of a parameter takes 10 µs; with DDP's hook, which casts a bucket, reduces it in 25 and
    copies the sum back, 60 (in one, in which the host waits for the queue, 200).
    """
    rank = Rank(0, 2, {"0": (0, 1)})
    for place in range(8):
        begin, reduces = (10 + 100 * place) * US, place % 2 == 1
        took = (200 if place == 7 else 60) if reduces else 10
        name = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
        rank.builder.op(name, begin, begin + took * US, thread=AUTOGRAD)
        rank.builder.launched("gemm", begin + US, begin + 2 * US, begin + 4 * US)
        if reduces:
            rank.builder.op("c10d::allreduce_", begin + 20 * US, begin + 45 * US, thread=AUTOGRAD)
            rank.kernel("allreduce", "0", begin + 40 * US, begin + 50 * US, launch=begin + 30 * US)
    found = analyze_rank(rank.builder.build()).progress.host
    assert found is not None
    assert found.cost_ns.tolist() == [50 * US] * 4


@pytest.mark.parametrize("rounded_ns", [0, 1, 250])
def test_a_reduction_that_begins_as_its_gradients_are_there_waited_for_them_however_times_are_rounded(
    rounded_ns: int,
) -> None:
    """Launched at 20 µs behind a kernel that ends at 100, it begins then, or so many ns before by the trace."""
    rank = Rank(0, 2, {"0": (0, 1)})
    rank.builder.launched("gemm", 5 * US, 10 * US, 100 * US)
    rank.kernel("allreduce", "0", 100 * US - rounded_ns, 150 * US, launch=20 * US)
    rank.builder.launched("gemm", 30 * US, 101 * US, 200 * US)
    found = analyze_rank(rank.builder.build()).progress
    assert found.ready_ns.tolist() == [100 * US - rounded_ns]


@pytest.mark.parametrize(("queued", "turnaround"), [(25, 1), (15, 0)])
def test_work_that_is_launched_late_would_begin_no_sooner_than_queued_work(queued: int, turnaround: int) -> None:
    """Kernels of 10 µs follow each other 1 µs apart from a full queue; then ten that come 30 µs apart, each launched 5
    before it begins. Of each such gap the device needs 1 µs itself, where enough gaps show that.
    """
    builder = TraceBuilder().step(1, 0, 2_000 * US)
    for number in range(queued):
        builder.launched("gemm", (10 + number) * US, (200 + 11 * number) * US, (210 + 11 * number) * US)
    end = 200 + 11 * queued - 1
    for number in range(10):
        begin = end + 40 * number + 30
        builder.launched("gemm", (begin - 5) * US, begin * US, (begin + 10) * US)
    own = analyze_rank(builder.build()).progress.own
    per_category = own.totals(np.array([200 * US]), np.array([(end + 400) * US]))[0]
    late = sum(int(per_category[category]) for category in (TimeCategory.LAUNCH, TimeCategory.HOST))
    assert per_category[TimeCategory.DEPENDENCY] == (queued - 1 + 10 * turnaround) * US
    assert late == 10 * (30 - turnaround) * US


@pytest.mark.parametrize("early", [2, 0, -2])
def test_a_copy_of_pageable_memory_is_waited_for_by_its_call(early: int) -> None:
    """Behind work until 500 µs, 400 µs of copying; its call returns 2 µs before the copy ends, with it, or after it."""
    builder = TraceBuilder().step(1, 0, 2_000 * US)
    builder.launched("gemm", 10 * US, 100 * US, 500 * US)
    builder.call("cudaMemcpyAsync", 50 * US, (900 - early) * US, correlation=77)
    builder.event(
        "Memcpy HtoD (Pageable -> Device)", Category.MEMCPY, 500 * US, 900 * US, correlation=77, device=0, stream=7
    )
    builder.launched("gemm", 950 * US, 960 * US, 1_000 * US)
    host = analyze_rank(builder.build()).progress.host
    assert host is not None
    assert host.waits.device_end_ns.tolist() == [900 * US]
    assert host.waits.noted_ns.tolist() == [NEVER]  # all that was launched before
