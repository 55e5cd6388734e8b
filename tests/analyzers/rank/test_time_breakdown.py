"""The time breakdown of one rank against answers by hand, in the drawings above each test."""

from __future__ import annotations

import numpy as np
import pytest

from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Category
from tests.traces import AUTOGRAD, MAIN, RUNLOOP, RUNLOOP_2, TraceBuilder

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def rows_of(partial: RankPartial) -> dict[str, int]:
    """ns of each row over all steps; rows without time are left out."""
    steps = partial.steps
    totals = partial.timeline.totals(steps.start_ns, steps.end_ns)
    assert np.array_equal(totals.sum(axis=1), steps.end_ns - steps.start_ns)
    return {row.name: int(value) for row, value in zip(TimeCategory, totals.sum(axis=0), strict=True) if value}


def breakdown_of(builder: TraceBuilder) -> dict[str, int]:
    return rows_of(analyze_rank(builder.build()))


def test_compute_hides_communication_and_both_hide_copies():
    """::

    compute   [100    200)      [300 400)
    nccl         [150        320)
    memcpy    [100                         450)
    """
    builder = TraceBuilder().step(1, 0, 500)
    builder.launched("gemm", 10, 100, 200).launched("gemm", 12, 300, 400)
    builder.launched(NCCL, 14, 150, 320, stream=20)
    builder.launched("Memcpy HtoD", 16, 100, 450, Category.MEMCPY, stream=21)
    partial = analyze_rank(builder.build())
    assert rows_of(partial) == {"COMPUTE": 200, "COMM_TRANSFER": 100, "COPY": 50}
    assert partial.communication.measure() == 170


def test_overlapping_kernels_count_once():
    builder = TraceBuilder().step(1, 0, 500)
    builder.launched("a", 10, 100, 200).launched("b", 12, 120, 260, stream=8).launched("c", 14, 260, 300)
    assert breakdown_of(builder) == {"COMPUTE": 200}


def test_annotations_on_the_device_and_waits_are_not_work():
    builder = TraceBuilder().step(1, 0, 500)
    builder.launched("a", 10, 100, 200).launched("b", 180, 300, 310)
    builder.event("ProfilerStep#1", Category.GPU_ANNOTATION, 100, 310, device=0, stream=7)
    builder.event("Stream Sync", Category.SYNC, 100, 400, device=0, stream=7)
    assert breakdown_of(builder) == {"COMPUTE": 110, "DEPENDENCY": 100}


def test_a_gap_before_work_that_was_already_queued_is_a_dependency():
    builder = TraceBuilder().step(1, 0, 500)
    builder.launched("a", 10, 100, 200).launched("b", 50, 230, 300)
    assert breakdown_of(builder) == {"COMPUTE": 170, "DEPENDENCY": 30}


def test_a_gap_is_launch_where_the_host_was_in_operators_and_host_where_it_was_not():
    """::

    device  ###100            200                300###
    host      in op [110 160)     |launch at 280
    """
    builder = TraceBuilder().step(1, 0, 500)
    builder.launched("a", 10, 50, 100).op("aten::add", 110, 160).launched("b", 280, 300, 350)
    # [110, 160) in an operator and [280, 300) from the launch on: launch; [100, 110) and [160, 280): the host.
    assert breakdown_of(builder) == {"COMPUTE": 100, "LAUNCH": 70, "HOST": 130}


def test_a_gap_inside_the_loader_is_the_loader_s():
    builder = TraceBuilder().step(1, 0, 500)
    builder.launched("a", 10, 50, 100)
    builder.note("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 90, 260)
    builder.op("aten::stack", 120, 130)
    builder.launched("b", 290, 300, 350)
    assert breakdown_of(builder) == {"COMPUTE": 100, "DATALOADER": 160, "HOST": 30, "LAUNCH": 10}


def test_a_sync_that_drained_the_device_is_charged_until_the_next_launch():
    """::

    device  ####### 100                       160 ###
    host    [20 sync   105)  op [110 130)  launch at 150
    """
    builder = TraceBuilder().step(1, 0, 500)
    builder.launched("a", 10, 50, 100).call("cudaStreamSynchronize", 20, 105)
    builder.op("aten::add", 110, 130).launched("b", 150, 160, 200)
    # Blocked for 85: the launch would have come 85 earlier, which covers the 50 of waiting for it.
    assert breakdown_of(builder) == {"COMPUTE": 90, "SYNC": 50, "LAUNCH": 10}


def test_a_sync_is_not_charged_more_than_it_blocked():
    builder = TraceBuilder().step(1, 0, 2000)
    builder.launched("a", 10, 50, 100).call("cudaDeviceSynchronize", 80, 105).launched("b", 1000, 1010, 1100)
    # Blocked for 25; the other 875 until the launch went by without it, in no operator: the host's.
    assert breakdown_of(builder) == {"COMPUTE": 140, "SYNC": 25, "HOST": 875, "LAUNCH": 10}


def test_a_sync_is_charged_only_in_the_gap_that_its_next_launch_ends():
    builder = TraceBuilder().step(1, 0, 500)
    builder.launched("a", 10, 50, 100).call("cudaDeviceSynchronize", 20, 105)
    builder.launched("b", 120, 130, 150).launched("c", 190, 200, 250)
    # The second gap (150 to 200) follows a launch: the host had the device again.
    assert breakdown_of(builder) == {"COMPUTE": 120, "SYNC": 20, "LAUNCH": 20, "HOST": 40}


def test_device_work_without_any_host_record_leaves_idle_unknown():
    builder = TraceBuilder()
    builder.event("a", Category.KERNEL, 100, 200, device=0, stream=7)
    builder.event("b", Category.KERNEL, 250, 300, device=0, stream=7)
    partial = analyze_rank(builder.build())
    assert not partial.steps.marked
    assert rows_of(partial) == {"COMPUTE": 150, "UNKNOWN": 50}


def test_a_device_window_runs_from_first_kernel_to_the_next_step_s_first():
    builder = TraceBuilder().step(4, 0, 200).step(5, 200, 400)
    builder.launched("a", 10, 100, 180).launched("b", 150, 250, 280).launched("c", 210, 300, 390)
    steps = analyze_rank(builder.build()).steps
    assert steps.number.tolist() == [4, 5]
    assert steps.start_ns.tolist() == [100, 300]
    assert steps.end_ns.tolist() == [300, 390]


def test_work_launched_before_the_recording_does_not_stretch_the_first_step():
    builder = TraceBuilder().step(4, 0, 200)
    builder.event(NCCL, Category.KERNEL, 5, 60, device=0, stream=20, correlation=999)
    builder.launched("a", 10, 100, 180)
    partial = analyze_rank(builder.build())
    assert partial.steps.start_ns.tolist() == [100]
    assert partial.collectives.step.tolist() == [-1]


def test_kernels_of_one_graph_launch_share_its_call():
    builder = TraceBuilder().step(1, 0, 500).call("cudaGraphLaunch", 10, 20, correlation=5)
    for start in (100, 200, 300):
        builder.event("k", Category.KERNEL, start, start + 50, device=0, stream=7, correlation=5)
    assert breakdown_of(builder) == {"COMPUTE": 150, "DEPENDENCY": 100}


def test_a_cpu_rank_has_the_same_rows():
    """::

    main     [loader 0-100) op[110 150)      op[300 350)  | step ends 400
    gloo                        [140   250)
    """
    builder = TraceBuilder(world_size=2).step(1, 0, 400)
    builder.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 100).op("aten::stack", 20, 60)
    builder.op("aten::mm", 110, 150).op("aten::add", 300, 350)
    builder.op("c10d::allreduce_", 130, 135).note("gloo:all_reduce", 140, 250, RUNLOOP)
    partial = analyze_rank(builder.build())
    assert rows_of(partial) == {"COMPUTE": 85, "COMM_TRANSFER": 100, "DATALOADER": 100, "HOST": 115}
    assert partial.communication.measure() == 110


def test_a_wait_inside_an_operator_is_not_compute():
    """The first operator that is given a tensor on its way awaits it: aten::relu [100 300), of which 120-280 waits."""
    builder = TraceBuilder(world_size=2).step(1, 0, 400)
    builder.op("aten::relu", 100, 300).op("_c10d_functional::wait_tensor", 120, 280)
    builder.note("gloo:all_reduce", 50, 270, RUNLOOP)
    assert rows_of(analyze_rank(builder.build())) == {"COMPUTE": 40, "COMM_TRANSFER": 200, "HOST": 160}


def test_a_cpu_rank_s_waits_inside_wrappers_are_not_compute():
    builder = TraceBuilder(world_size=2).step(1, 0, 400)
    builder.op("autograd::engine::evaluate_function: AddmmBackward0", 10, 200).op("AddmmBackward0", 10, 200)
    builder.op("aten::mm", 20, 60).note("gloo:all_reduce", 60, 190, RUNLOOP)
    # The collective runs while the autograd node around it waits.
    assert breakdown_of(builder) == {"COMPUTE": 40, "COMM_TRANSFER": 130, "HOST": 230}


def test_a_cpu_rank_counts_autograd_s_thread_and_not_the_backend_s():
    builder = TraceBuilder(world_size=2).step(1, 0, 100)
    builder.op("autograd::engine::evaluate_function: X", 10, 90, AUTOGRAD).op("aten::mm", 20, 50, AUTOGRAD)
    builder.op("aten::mm", 60, 80, RUNLOOP).op("aten::mm", 90, 95, RUNLOOP_2).op("aten::mm", 40, 55, MAIN)
    assert breakdown_of(builder) == {"COMPUTE": 35, "HOST": 65}


def test_steps_fall_back_on_the_optimizer():
    builder = TraceBuilder()
    for end in (100, 250, 420):
        builder.note("Optimizer.step#AdamW.step", end - 20, end).op("aten::mm", end - 50, end - 30)
    steps = analyze_rank(builder.build()).steps
    assert steps.source.startswith("optimizer steps")
    assert steps.start_ns.tolist() == [100, 250]
    assert steps.end_ns.tolist() == [250, 420]


@pytest.mark.parametrize("pause", ["gc.collect", "torch.save"])
def test_host_work_with_a_name_is_named(pause):
    builder = TraceBuilder().step(1, 0, 500)
    builder.launched("a", 10, 50, 100).note(pause, 120, 180).launched("b", 290, 300, 350)
    named = {name: part.measure() for name, part in analyze_rank(builder.build()).named_host.items()}
    assert [time for time in named.values() if time] == [60]
