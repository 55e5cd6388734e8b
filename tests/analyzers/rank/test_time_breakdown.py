"""The time breakdown of one rank against answers by hand, in the drawings above each test."""

from __future__ import annotations

import numpy as np
import pytest

from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import DEVICE_WORK, Category
from tests.traces import AUTOGRAD, MAIN, RUNLOOP, RUNLOOP_2, TraceBuilder

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def rows_of(partial: RankPartial, within: tuple[int, int] | None = None) -> dict[str, int]:
    """ns of each row over all steps, or between two moments of them; rows without time are left out."""
    steps = partial.steps
    totals = partial.timeline.totals(steps.start_ns, steps.end_ns)
    assert np.array_equal(totals.sum(axis=1), steps.end_ns - steps.start_ns)
    if within is not None:
        assert steps.start_ns[0] <= within[0] < within[1] <= steps.end_ns[-1]
        totals = partial.timeline.totals(*(np.array([time], dtype=np.int64) for time in within))
    return {row.name: int(value) for row, value in zip(TimeCategory, totals.sum(axis=0), strict=True) if value}


def breakdown_of(builder: TraceBuilder) -> dict[str, int]:
    """The rows from the first to the last work on the device, which is what the drawings show; else of the steps."""
    trace = builder.build()
    work = trace.rows(*DEVICE_WORK)
    within = (int(trace.start_ns[work].min()), int(trace.end_ns[work].max())) if len(work) else None
    return rows_of(analyze_rank(trace), within)


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
    assert rows_of(partial, (100, 450)) == {"COMPUTE": 200, "COMM_TRANSFER": 100, "COPY": 50}
    assert partial.communication.measure() == 170


def test_overlapping_kernels_count_once():
    builder = TraceBuilder().step(1, 0, 500)
    builder.launched("a", 10, 100, 200).launched("b", 12, 120, 260, stream=8).launched("c", 14, 260, 300)
    assert breakdown_of(builder) == {"COMPUTE": 200}


def test_annotations_on_the_device_and_waits_are_not_work():
    builder = TraceBuilder().step(1, 0, 500)
    builder.launched("a", 95, 100, 200).launched("b", 180, 300, 310)
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
    # Blocked for 85: launched 85 earlier, at 65, b would have followed a at 100, and none of the 60 would be idle.
    assert breakdown_of(builder) == {"COMPUTE": 90, "SYNC": 60}


def test_a_sync_is_not_charged_more_than_it_blocked():
    builder = TraceBuilder().step(1, 0, 2000).op("aten::empty", 1, 2)
    builder.launched("a", 10, 50, 100).call("cudaDeviceSynchronize", 80, 105).launched("b", 1000, 1010, 1100)
    # Blocked for 25; the other 875 until the launch went by without it, in no operator: the host's.
    assert breakdown_of(builder) == {"COMPUTE": 140, "SYNC": 25, "HOST": 875, "LAUNCH": 10}


def test_a_sync_is_charged_until_the_time_that_it_blocked_is_used_up():
    builder = TraceBuilder().step(1, 0, 500).op("aten::empty", 1, 2)
    builder.launched("a", 10, 50, 100).call("cudaDeviceSynchronize", 45, 105)
    builder.launched("b", 120, 130, 150).launched("c", 190, 200, 250)
    # Blocked for 60. Launched 60 earlier, b would have run in [100, 120) and c, launched at 130, in [140, 190): of the
    # idle 80, 60 less. 30 are before b and 30 of the 50 before c, whose last 20 are a pause of 10 and a launch of 10.
    assert breakdown_of(builder) == {"COMPUTE": 120, "SYNC": 60, "HOST": 10, "LAUNCH": 10}


def test_device_work_without_any_host_record_leaves_idle_unknown():
    builder = TraceBuilder()
    builder.event("a", Category.KERNEL, 100, 200, device=0, stream=7)
    builder.event("b", Category.KERNEL, 250, 300, device=0, stream=7)
    partial = analyze_rank(builder.build())
    assert not partial.steps.marked
    assert rows_of(partial) == {"COMPUTE": 150, "UNKNOWN": 50}


def windows_of(builder: TraceBuilder) -> list[tuple[int, int, int]]:
    """(number, start, end) of each step."""
    steps = analyze_rank(builder.build()).steps
    return list(zip(steps.number.tolist(), steps.start_ns.tolist(), steps.end_ns.tolist(), strict=True))


def test_a_window_begins_when_the_work_of_the_step_before_is_done():
    """::

    host    step 4 [0                200) step 5 [200          400)
    device               #100   180# #250  280#     #300  390#
    """
    builder = TraceBuilder().step(4, 0, 200).step(5, 200, 400)
    builder.launched("a", 10, 100, 180).launched("b", 150, 250, 280).launched("c", 210, 300, 390)
    # At 200 the device is 80 behind, as it counts to be at 0; the host ends step 5 after the device.
    assert windows_of(builder) == [(4, 80, 280), (5, 280, 400)]


def test_a_window_is_a_whole_period_however_many_steps_are_recorded():
    """Each step loads for 60, launches at 70 and 75 what takes 20 and 30 on the device, ends at 80."""
    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    for count in (1, 2, 3):
        builder = TraceBuilder()
        for step in range(count):
            at = 80 * step
            builder.step(step, at, at + 80).note(loader, at + 2, at + 62)
            builder.launched("a", at + 70, at + 75, at + 95).launched("b", at + 76, at + 95, at + 125)
        partial = analyze_rank(builder.build())
        # The device ends each step 45 after the host; it idles 30 in between, 17 of them while a batch is loaded.
        assert (partial.steps.end_ns - partial.steps.start_ns).tolist() == [80] * count
        rows = rows_of(partial)
        assert (rows["COMPUTE"], rows["DATALOADER"], sum(rows.values())) == (50 * count, 17 * count, 80 * count)


def test_the_device_is_as_far_behind_as_at_the_other_steps_that_wait_for_a_pair_of_batches():
    """Two workers deliver together every 200, the device takes 90 a step. So the host waits in every other step, and
    begins that 165 before the device is done with the two before it::

        host    step 0 [10                       195) 1 [195 210) step 2 [210
        device                          175  #195   285##285   375#  375  #395
    """
    loader = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    for count in (2, 3, 4, 5, 6):
        builder = TraceBuilder()
        for step in range(count):
            pair, second = 200 * (step // 2), step % 2
            begin = pair + (195 if second else 10)
            builder.step(step, begin, pair + (210 if second else 195)).note(loader, begin + 1, pair + 190 + 10 * second)
            builder.launched("a", pair + 191 + 12 * second, pair + 195 + 90 * second, pair + 285 + 90 * second)
        steps = analyze_rank(builder.build()).steps
        assert (steps.end_ns - steps.start_ns).tolist()[: count - 1] == [110, 90, 110, 90, 110][: count - 1]


def test_a_lone_step_whose_host_waits_for_its_device_is_the_host_s():
    builder = TraceBuilder().step(1, 0, 300).note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 5, 105)
    builder.launched("a", 120, 125, 250).call("cudaDeviceSynchronize", 130, 255)
    assert windows_of(builder) == [(1, 0, 300)]
    rows = rows_of(analyze_rank(builder.build()))
    assert (rows["COMPUTE"], rows["DATALOADER"], sum(rows.values())) == (125, 100, 300)


def test_a_copy_that_begins_at_once_shows_that_the_device_was_idle_before_a_lone_step():
    """The device ends 100 behind its host. It had begun the copy of the batch 5 after its launch, so it was not behind
    at the step's begin; a copy on another stream does not show that::

        host      [0  copy 10                 120 a          300)
        stream 7          [15         115)     [125                    400)
    """
    for stream, begin in ((7, 15), (21, 100)):
        builder = TraceBuilder().step(1, 0, 300).launched("a", 120, 125, 400)
        builder.launched("Memcpy HtoD", 10, 15, 115, Category.MEMCPY, stream=stream)
        assert windows_of(builder) == [(1, begin, 400)]


def test_a_device_that_is_busy_all_the_time_has_windows_from_first_kernel_to_first_kernel():
    """The host launches a step in 30, the device takes 100 for it; a copy of step 1 runs into step 2."""
    builder = TraceBuilder()
    for step in range(3):
        builder.step(step, 30 * step, 30 * step + 30).launched("a", 30 * step + 5, 10 + 100 * step, 110 + 100 * step)
    builder.launched("Memcpy DtoH", 40, 190, 240, Category.MEMCPY, stream=21)
    assert windows_of(builder) == [(0, 10, 110), (1, 110, 210), (2, 210, 310)]


def test_steps_that_do_not_follow_one_another_end_with_their_own_work():
    builder = TraceBuilder().step(4, 0, 100).step(8, 1000, 1100)
    builder.launched("a", 10, 20, 90).launched("b", 1010, 1020, 1150)
    # Step 8 ends 50 after its host, so it counts as begun as late; but it began with its kernel at the latest.
    assert windows_of(builder) == [(4, 0, 100), (8, 1020, 1150)]


def test_a_step_without_work_does_not_lengthen_the_one_before():
    builder = TraceBuilder().step(1, 0, 100).step(2, 100, 180).step(3, 180, 280)
    builder.launched("a", 10, 20, 90).launched("b", 190, 200, 270)
    assert windows_of(builder) == [(1, 0, 100), (3, 180, 280)]


def test_work_launched_before_the_recording_is_of_no_step():
    builder = TraceBuilder().step(4, 0, 200)
    builder.event(NCCL, Category.KERNEL, 5, 60, device=0, stream=20, correlation=999)
    builder.launched("a", 10, 100, 180)
    partial = analyze_rank(builder.build())
    # The device was at the step before until 60.
    assert windows_of(builder) == [(4, 60, 200)]
    assert partial.collectives.step.tolist() == [-1]


def test_work_whose_launch_was_lost_does_not_say_when_the_recording_began():
    builder = TraceBuilder().step(4, 0, 200)
    builder.event("k", Category.KERNEL, 5, 60, device=0, stream=7, correlation=999)
    builder.launched("a", 10, 100, 120)
    builder.event("k", Category.KERNEL, 130, 160, device=0, stream=7, correlation=998)
    assert windows_of(builder) == [(4, 0, 200)]


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


@pytest.mark.parametrize(
    ("taken", "numbers", "edges"),
    [
        ([5, 105, 255], [0, 1, 2], [5, 105, 255, 430]),
        ([105, 255], [1, 2], [105, 255, 430]),  # the first step is cut
        ([5, 105, 255, 425], [0, 1, 2], [5, 105, 255, 425]),  # and what follows the last
        ([5, 30, 105, 130, 255, 300], [0, 1, 2], [5, 105, 255, 430]),
        ([30, 105, 130, 255, 300], [1, 2], [105, 255, 430]),
        ([5, 105, 130, 255], [1, 2], [100, 250, 420]),  # not every step takes as many
        ([130], [1, 2], [100, 250, 420]),
    ],
)
def test_steps_that_nothing_marks_begin_with_their_first_batch(taken, numbers, edges):
    """Optimizer steps end at 100, 250 and 420, the loop's last operator at 430; then the profiler waits."""
    builder = TraceBuilder()
    for at in taken:
        builder.note("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", at, at + 3)
    for end in (100, 250, 420):
        builder.note("Optimizer.step#AdamW.step", end - 20, end).op("aten::mm", end - 50, end - 30)
    builder.op("aten::zero_", 428, 430).call("cudaDeviceSynchronize", 430, 900)
    steps = analyze_rank(builder.build()).steps
    assert (steps.number.tolist(), steps.start_ns.tolist(), steps.end_ns.tolist()) == (numbers, edges[:-1], edges[1:])


@pytest.mark.parametrize(
    ("stepped", "taken", "edges"),
    [
        ("DGDGDGDG", [5, 205, 405, 605], [5, 205, 405, 605, 800]),
        ("GDGDGD", [105, 305, 505], [105, 305, 505]),  # the last step is cut
        ("DGDGDGG", [5, 205, 305, 605], [100, 200, 300, 400, 500, 600, 700]),  # batches do not come as often
    ],
)
def test_optimizers_that_share_a_batch_share_a_step(stepped, taken, edges):
    """Those of a GAN, one after the other every 100; a batch every 200."""
    builder = TraceBuilder()
    for at in taken:
        builder.note("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", at, at + 3)
    for number, _ in enumerate(stepped):
        end = 100 * (number + 1)
        builder.note("Optimizer.step#Adam.step", end - 20, end).op("aten::mm", end - 50, end - 30)
    steps = analyze_rank(builder.build()).steps
    assert [*steps.start_ns.tolist(), int(steps.end_ns[-1])] == edges


@pytest.mark.parametrize(("first", "edges"), [("Dense", [100, 200, 300]), ("Sparse", [130, 230, 330])])
def test_optimizers_in_turn_end_a_step_together(first, edges):
    """Two in each step, whichever the recording begins with: the host takes longest after the sparse one."""
    builder, names = TraceBuilder(), {"Dense": [70, 170, 270], "Sparse": [100, 200, 300]}
    if first == "Sparse":
        names = {"Dense": [100, 200, 300], "Sparse": [30, 130, 230, 330]}
    for name, ends in names.items():
        for end in ends:
            builder.note(f"Optimizer.step#{name}.step", end - 20, end).op("aten::mm", end - 15, end - 5)
    steps = analyze_rank(builder.build()).steps
    assert [*steps.start_ns.tolist(), int(steps.end_ns[-1])] == (edges if first == "Dense" else [30, *edges])


@pytest.mark.parametrize(
    ("host", "device", "window"),
    [
        ((0, 500), (300, 480), (0, 500)),  # the host prepares the first work, and goes on after the last
        ((0, 400), (30, 480), (30, 480)),  # the device ends 80 behind, so it began as far behind, or at its first work
        ((0, 400), (300, 480), (80, 480)),
    ],
)
def test_a_recording_without_steps_lasts_from_its_host_s_begin(host, device, window):
    builder = TraceBuilder().note("prepare", *host).op("aten::mm", device[0] - 20, device[0] - 1)
    builder.launched("mm", device[0] - 10, *device)
    steps = analyze_rank(builder.build()).steps
    assert (steps.start_ns.tolist(), steps.end_ns.tolist()) == ([window[0]], [window[1]])
    assert not steps.marked


def test_a_lone_step_that_nothing_marks_lasts_from_its_batch_to_the_pause_after_it():
    builder = TraceBuilder().note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 100)
    builder.launched("a", 110, 115, 150).note("Optimizer.step#SGD.step", 105, 120).call(
        "cudaDeviceSynchronize", 300, 320
    )
    assert windows_of(builder) == [(0, 0, 300)]
    rows = rows_of(analyze_rank(builder.build()))
    assert (rows["DATALOADER"], rows["COMPUTE"], sum(rows.values())) == (100, 35, 300)


@pytest.mark.parametrize("pause", ["gc.collect", "torch.save"])
def test_host_work_with_a_name_is_named(pause):
    builder = TraceBuilder().step(1, 0, 500)
    builder.launched("a", 10, 50, 100).note(pause, 120, 180).launched("b", 290, 300, 350)
    named = {name: part.measure() for name, part in analyze_rank(builder.build()).named_host.items()}
    assert [time for time in named.values() if time] == [60]


MS = 1_000_000


def test_a_pause_after_a_sync_is_the_host_s():
    """A pause of 8 ms after a sync that blocked for 10::

    device  ### 12 ms                                 20.3 ms ###
    host    [2 sync 12.1)      nothing      [20.1 op) launch at 20.2
    """
    builder = TraceBuilder().step(1, 0, 30 * MS)
    builder.launched("a", MS, 2 * MS, 12 * MS).call("cudaStreamSynchronize", 2 * MS, 12_100_000)
    builder.op("aten::mm", 20_100_000, 20_250_000).launched("b", 20_200_000, 20_300_000, 25 * MS)
    # Without the sync b would have been in time; but the host was not in it any more. 0.1 ms to return and 0.2 ms until
    # b is on the device are the sync's.
    assert breakdown_of(builder) == {"COMPUTE": 10 * MS + 4_700_000, "HOST": 8 * MS, "SYNC": 300_000}


@pytest.mark.parametrize(
    ("call", "copied"),
    [
        ("cudaMemcpyAsync", "Memcpy DtoH (Device -> Pageable)"),
        ("cudaMemcpyAsync", "Memcpy HtoD (Pageable -> Device)"),
        ("hipMemcpyWithStream", "Memcpy DtoH (Device -> Host)"),
        ("hipMemcpyWithStream", "CopyDeviceToHost"),
        ("hipMemcpyAsync", "Memcpy DtoH (Device -> Host)"),
        ("cudaMemcpyAsync", "Memcpy DtoH (Device -> Pinned)"),
        ("cudaMemcpyAsync", "Memcpy DtoD (Device -> Device)"),
    ],
)
def test_copies_that_wait_for_their_end_block_the_host(call, copied):
    builder = TraceBuilder().step(1, 0, 500)
    builder.launched("a", 10, 50, 100)
    builder.call(call, 20, 113, correlation=77)
    builder.event(copied, Category.MEMCPY, 102, 111, device=0, stream=7, correlation=77)
    builder.launched("b", 140, 150, 200)
    found = breakdown_of(builder)
    blocks = "Pageable" in copied or "Host" in copied
    assert found.get("SYNC", 0) == (39 if blocks else 0)
    assert found["COPY"] == 9


def test_a_small_copy_that_the_driver_sets_aside_does_not_block():
    builder = TraceBuilder().step(1, 0, 500).op("aten::empty", 1, 2)
    builder.launched("a", 10, 50, 100).call("cudaMemcpyAsync", 20, 28, correlation=77)
    builder.event("Memcpy HtoD (Pageable -> Device)", Category.MEMCPY, 100, 110, device=0, stream=7, correlation=77)
    builder.launched("b", 140, 150, 200)
    assert breakdown_of(builder) == {"COMPUTE": 100, "COPY": 10, "HOST": 30, "LAUNCH": 10}


@pytest.mark.parametrize("call", ["cudaStreamSynchronize", "cudaEventSynchronize", "hipStreamSynchronize", "cudaFree"])
def test_a_blocking_call_of_any_kind_is_charged(call):
    builder = TraceBuilder().step(1, 0, 500)
    builder.launched("a", 10, 50, 100).call(call, 20, 105).launched("b", 150, 160, 200)
    assert breakdown_of(builder) == {"COMPUTE": 90, "SYNC": 60}


def test_work_that_was_launched_before_the_recording_was_queued():
    builder = TraceBuilder().step(1, 0, 500)
    builder.launched("a", 10, 20, 30, stream=8)
    builder.event("old", Category.KERNEL, 60, 100, device=0, stream=7).launched("b", 45, 110, 150)
    assert breakdown_of(builder) == {"COMPUTE": 90, "DEPENDENCY": 40}


def test_a_launch_on_its_way_to_the_device_is_not_queued():
    """Launches take 20 to arrive (a, b). c was launched 5 before the gap and starts 20 after its launch: no wait."""
    builder = TraceBuilder().step(1, 0, 500).op("aten::empty", 1, 2)
    builder.launched("z", 1, 10, 20).launched("a", 30, 50, 60).launched("b", 80, 100, 130).launched("c", 125, 145, 150)
    assert breakdown_of(builder) == {"COMPUTE": 55, "LAUNCH": 55, "HOST": 30}


def test_a_graph_runs_between_its_nodes():
    """A wait of 2 µs between nodes is the device's; what ran in the 300 µs before the last node is not recorded."""
    builder = TraceBuilder().step(1, 0, MS).call("cudaGraphLaunch", 10, 20, correlation=5)
    for start in (100_000, 152_000, 502_000):
        builder.event("k", Category.KERNEL, start, start + 50_000, device=0, stream=7, correlation=5)
    assert breakdown_of(builder) == {"COMPUTE": 150_000, "DEPENDENCY": 2_000, "UNKNOWN": 300_000}


@pytest.mark.parametrize("waits", [False, True])
def test_a_graph_without_recorded_nodes_is_unknown_work(waits):
    """::

    device  a 100                                  400 b | 420 c
    host    graph at 60   [sync 130        350)  launch b at 390 (without the sync at 65)
    """
    builder = TraceBuilder().step(1, 0, 500).launched("a", 45, 50, 100).call("cudaGraphLaunch", 60, 64, correlation=77)
    if waits:
        builder.call("cudaStreamSynchronize", 130, 350)
    builder.launched("b", 390 if waits else 65, 400, 420)
    if waits:
        # The graph ended before the sync returned. It blocked for 220: longer than the 50 that then pass.
        assert breakdown_of(builder) == {"COMPUTE": 70, "UNKNOWN": 250, "SYNC": 50}
    else:
        assert breakdown_of(builder) == {"COMPUTE": 70, "UNKNOWN": 300}


def test_work_that_is_launched_behind_a_graph_without_recorded_nodes_waits_for_it():
    """A batch is copied, a graph launched, then ``b``, which waits for the graph; ``item()`` waits for ``b``. ::

    device  a 100                                          90 000 b 90 100
    host    graph at 60  launch b at 150  [sync 200                       90 200)
    """
    builder = TraceBuilder().step(1, 0, MS).launched("a", 45, 50, 100).call("cudaGraphLaunch", 60, 64, correlation=77)
    builder.launched("b", 150, 90_000, 90_100).call("cudaStreamSynchronize", 200, 90_200)
    assert breakdown_of(builder) == {"COMPUTE": 150, "UNKNOWN": 89_900}


def test_nodes_of_a_graph_whose_launch_they_do_not_name_are_its_own():
    builder = TraceBuilder().step(1, 0, MS).launched("a", 10, 50, 100).call("hipGraphLaunch", 60, 64, correlation=77)
    for start in (150, 250):
        builder.event("k", Category.KERNEL, start, start + 80, device=0, stream=7)
    assert breakdown_of(builder) == {"COMPUTE": 210, "DEPENDENCY": 70}


def test_work_that_was_queued_for_long_waited_for_something_that_is_not_recorded():
    builder = TraceBuilder().step(1, 0, MS).launched("a", 10, 50, 100)
    builder.launched("b", 60, 18_000, 19_000).launched("c", 70, 60_000, 61_000)
    assert breakdown_of(builder) == {"COMPUTE": 2_050, "DEPENDENCY": 17_900, "UNKNOWN": 41_000}


def test_a_pause_is_named_after_the_innermost_python_function_that_lasts_as_long():
    """Stacks: train > step > log (0.1 ms less than the pause, which it explains), and short ones inside it."""
    builder = TraceBuilder().step(1, 0, 30 * MS)
    builder.launched("a", MS, 2 * MS, 3 * MS).launched("b", 20 * MS, 21 * MS, 22 * MS)
    for name, start, end in (
        ("train.py(10): train", 0, 30 * MS),
        ("train.py(40): step", MS, 25 * MS),
        ("train.py(70): log", MS + 100_000, 20 * MS),
        ("<built-in method write of file>", MS + 110_000, 20 * MS),
        ("train.py(90): render", 4 * MS, 5 * MS),
    ):
        builder.event(name, Category.PYTHON, start, end)
    partial = analyze_rank(builder.build())
    named = {name: part.measure() for name, part in partial.named_host.items()}
    assert [name for name, time in named.items() if time] == ["train.py(70): log"]
    assert named["train.py(70): log"] == 19 * MS - 1


def test_without_recorded_operators_the_time_between_two_calls_is_launch_unless_it_is_a_pause():
    builder = TraceBuilder().step(1, 0, 30 * MS)
    builder.launched("a", 0, 10_000, 20_000).launched("b", 400_000, 410_000, MS).launched("c", 8 * MS, 9 * MS, 10 * MS)
    assert breakdown_of(builder) == {"COMPUTE": 1_600_000, "LAUNCH": 390_000 + MS, "HOST": 7 * MS}


@pytest.mark.parametrize(("copied_at", "begins"), [(80 * MS, 80 * MS), (10_400_000, 10 * MS)])
def test_the_first_step_begins_when_earlier_work_is_done_that_is_not_recorded(copied_at, begins):
    """The step's first call copies. Where it waits for 70 ms before that, the device did something else until then."""
    builder = TraceBuilder().step(1, 10 * MS, 125 * MS).call("cudaMemcpyAsync", 10 * MS, 85 * MS, correlation=77)
    name = "Memcpy HtoD (Pageable -> Device)"
    builder.event(name, Category.MEMCPY, copied_at, 90 * MS, device=0, stream=7, correlation=77)
    builder.launched("a", 95 * MS, 110 * MS, 120 * MS)
    steps = analyze_rank(builder.build()).steps
    assert (steps.start_ns.tolist(), steps.end_ns.tolist()) == ([begins], [125 * MS])


@pytest.mark.parametrize(("starts", "begins"), [(70 * MS, 70 * MS), (20_020_000, 10 * MS)])
def test_the_first_step_begins_when_earlier_work_is_done_that_its_first_copy_was_queued_behind(starts, begins):
    """The host loads for 10 ms and launches. Where the copy starts 50 ms later, the device was busy until then; where
    it starts at once, the device was idle. At the end the host waits for its device."""
    builder = TraceBuilder().step(1, 10 * MS, 130 * MS).call("cudaMemcpyAsync", 20 * MS, 20_010_000, correlation=77)
    name = "Memcpy HtoD (Pinned -> Device)"
    builder.event(name, Category.MEMCPY, starts, starts + 5 * MS, device=0, stream=7, correlation=77)
    builder.launched("a", 20_050_000, 76 * MS, 120 * MS).call("cudaDeviceSynchronize", 30 * MS, 121 * MS)
    steps = analyze_rank(builder.build()).steps
    assert (steps.start_ns.tolist(), steps.end_ns.tolist()) == ([begins], [130 * MS])


def test_a_device_that_a_profiler_drained_idles_before_the_first_step_as_before_others_that_wait_as_long():
    """Two workers deliver together every 200, the device takes 90 a step. The profiler drained the device at 100, so
    the host is 75 later than in step 2 as it begins to wait::

        host    step 0 [100                      195) 1 [195 210) step 2 [210
        device                               #195   285##285   375#  375  #395
    """
    builder = TraceBuilder().step(0, 100, 195).launched("a", 191, 195, 285)
    builder.step(1, 195, 210).launched("a", 203, 285, 375).step(2, 210, 395).launched("a", 391, 395, 485)
    builder.step(3, 395, 410).launched("a", 403, 485, 575)
    assert windows_of(builder) == [(0, 175, 285), (1, 285, 375), (2, 375, 485), (3, 485, 575)]
