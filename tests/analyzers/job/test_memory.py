"""Memory by hand: peaks, the curve of a chart, and the row of each rank."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfscope.analyzers import readers
from perfscope.analyzers.job.aligned import AlignedJob, align_job
from perfscope.analyzers.job.memory import MAX_RANKS, memory_rows, memory_timelines
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.memory import COLUMNS, cut, rank_memory, thin
from perfscope.analyzers.rank.partial import MemoryUse
from perfscope.analyzers.rank.steps import Steps
from perfscope.recording.metadata import DeviceMetadata, RunMetadata
from perfscope.trace.trace import NONE, Category, Int64, MemoryCounter, Trace
from tests.traces import TraceBuilder

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
STEP = 10_000
GIB = 1 << 30
H100 = Path(__file__).parents[4] / "shared" / "traces" / "h100_eager_single" / "trace.json.gz"


def ints(*values: int) -> Int64:
    return np.array(values, dtype=np.int64)


def counter(*events: tuple[int, int, int, int]) -> MemoryCounter:
    """Events as (time, device, allocated, reserved)."""
    return MemoryCounter(*(np.array(column, dtype=np.int64) for column in zip(*events, strict=True)))


def gpu_rank(rank: int, *events: tuple[int, int, int, int], shift: int = 0, ranks: int = 2) -> Trace:
    """Two steps with an all-reduce each, on a clock ``shift`` ahead of the events' times."""
    builder = TraceBuilder(rank=rank, world_size=ranks)
    for at in (shift, shift + STEP):
        group = {
            "kind": "allreduce", "group": "0", "ranks": json.dumps(list(range(ranks))), "dtype": "Float",
            "elements_in": 500, "elements_out": 500, "group_size": ranks,
        }  # fmt: skip
        builder.step((at - shift) // STEP, at, at + STEP)
        builder.launched("gemm", at + 10, at + 100, at + 1000)
        builder.launched(NCCL, at + 20, at + 1000, at + 5000, stream=20, collective=group)
        builder.launched("adam", at + 30, at + 5000, at + 9900)
    moved = [(time + shift, device, allocated, reserved) for time, device, allocated, reserved in events]
    return replace(builder.build(), memory=counter(*moved)) if moved else builder.build()


def compared(*traces: Trace) -> AlignedJob:
    partials = [analyze_rank(trace) for trace in traces]
    return align_job({partial.rank: partial for partial in partials if partial.rank is not None})


def steps_of(start: int, end: int) -> Steps:
    return Steps(ints(0), ints(start), ints(end), ints(start), ints(end), ints(0 * start), "", marked=True)


def uses_of(*events: tuple[int, int, int, int], start: int = 0, end: int = 100) -> tuple[MemoryUse, ...]:
    return rank_memory(
        replace(TraceBuilder().event("x", Category.OTHER, 0, 1).build(), memory=counter(*events)), steps_of(start, end)
    )


class TestOfOneRank:
    def test_peaks_count_also_outside_the_steps_but_the_course_does_not(self):
        (use,) = uses_of((-50, 0, 90, 100), (-10, 0, 40, 80), (20, 0, 70, 80), (120, 0, 10, 80))
        assert (use.device, use.peak_allocated, use.peak_reserved) == (0, 90, 100)
        # What was held when the steps began is the first point, what was held at their end the last.
        assert use.time_ns.tolist() == [0, 20, 100]
        assert use.allocated.tolist() == [40, 70, 70]
        assert use.reserved.tolist() == [80, 80, 80]

    def test_fragmentation_is_looked_at_where_the_most_was_reserved(self):
        (use,) = uses_of((0, 0, 95, 100), (10, 0, 60, 200), (20, 0, 150, 200), (30, 0, 120, 200), (40, 0, 50, 100))
        assert (use.peak_reserved, use.allocated_at_peak) == (200, 150)

    def test_devices_are_distinguished(self):
        first, second = uses_of((0, 0, 5, 10), (10, 3, 50, 60), (20, 0, 6, 10))
        assert [(use.device, use.peak_allocated) for use in (first, second)] == [(0, 6), (3, 50)]

    def test_the_host_counts_only_where_no_device_does_and_reserves_nothing(self):
        (use,) = uses_of((0, NONE, 5, 0), (10, NONE, 9, 0))
        assert (use.device, use.peak_allocated, use.peak_reserved, use.allocated_at_peak) == (NONE, 9, None, None)
        assert use.reserved.tolist() == [NONE] * 3
        (use,) = uses_of((0, NONE, 500, 0), (10, 1, 9, 10))
        assert (use.device, use.peak) == (1, 10)

    def test_nothing_recorded(self):
        assert rank_memory(TraceBuilder().event("x", Category.OTHER, 0, 1).build(), steps_of(0, 100)) == ()


class TestThePicture:
    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 2**32 - 1), st.integers(1, 5000), st.integers(1, 10**12))
    def test_every_column_keeps_its_first_last_lowest_and_highest(self, seed: int, points: int, span: int):
        random = np.random.default_rng(seed)
        time = np.sort(random.integers(0, span, points, endpoint=True))
        series = [np.cumsum(random.integers(-1000, 1001, points)), random.integers(0, 5, points) * 2**30]
        kept = thin(time, series, 0, span)
        assert (np.diff(kept) > 0).all()
        assert len(kept) <= 6 * (COLUMNS + 1)
        assert (kept[0], kept[-1]) == (0, points - 1)
        column = time * COLUMNS // max(span, 1)
        for values in series:
            # Where a point was left out, what holds from the point before fills the same pixels.
            drawn = values[kept][np.searchsorted(kept, np.arange(points), side="right") - 1]
            for place in np.unique(column):
                inside = column == place
                assert drawn[inside].max() == values[inside].max()
                assert drawn[inside].min() == values[inside].min()

    def test_a_spike_of_one_event_among_a_million_survives(self):
        time = np.arange(1_000_000, dtype=np.int64)
        values = np.full(len(time), 10, dtype=np.int64)
        values[654_321], values[654_322] = 99, 1
        kept = thin(time, [values], 0, len(time))
        assert kept.tolist() == [0, *kept[1:-1].tolist(), len(time) - 1]
        assert {654_321, 654_322} <= set(kept.tolist())
        assert len(kept) < 10

    def test_cut(self):
        time, values = ints(10, 20, 30), ints(1, 2, 3)
        for (start, end), (times, held) in {
            (15, 25): ([15, 20, 25], [1, 2, 2]),
            (0, 40): ([10, 20, 30, 40], [1, 2, 3, 3]),
            (50, 60): ([50, 60], [3, 3]),
            (0, 5): ([], []),
        }.items():
            got, (column,) = cut(time, [values], start, end)
            assert (got.tolist(), column.tolist()) == (times, held)


class TestRows:
    def test_the_run_s_own_count_goes_first_and_the_trace_fills_the_rest(self):
        result = compared(gpu_rank(0, (50, 0, 3 * GIB, 4 * GIB)), gpu_rank(1, (50, 0, 3 * GIB, 4 * GIB)))
        record = DeviceMetadata(
            type="cuda", capacity_bytes=96 * GIB, peak_bytes=60 * GIB, allocated_peak_bytes=45 * GIB,
            allocation_retries=2,
        )  # fmt: skip
        first, second = memory_rows(result, {0: RunMetadata(device=record)})
        assert (first.peak_bytes, first.allocated_peak_bytes) == (60 * GIB, 45 * GIB)
        assert (first.capacity_bytes, first.headroom_bytes, first.allocation_retries) == (96 * GIB, 36 * GIB, 2)
        assert first.fragmentation == 0.25
        # TraceBuilder's device has 80 GiB.
        assert (second.peak_bytes, second.allocated_peak_bytes) == (4 * GIB, 3 * GIB)
        assert (second.capacity_bytes, second.headroom_bytes, second.allocation_retries) == (80 * GIB, 76 * GIB, None)
        assert (second.fragmentation, second.kind) == (0.25, "device")

    def test_the_run_s_peaks_alone_show_fragmentation_too(self):
        record = DeviceMetadata(type="cuda", peak_bytes=100, allocated_peak_bytes=90)
        (row,) = memory_rows(compared(gpu_rank(0, ranks=1)), {0: RunMetadata(device=record)})
        assert row.fragmentation == pytest.approx(0.1)

    def test_the_host_s_memory_is_called_so_and_claims_no_peak(self):
        trace = TraceBuilder().step(0, 0, STEP).op("aten::mm", 10, 9000).build()
        (row,) = memory_rows(compared(replace(trace, memory=counter((5, NONE, 700, 0)))), {})
        assert (row.kind, row.allocated_peak_bytes) == ("host", 700)
        assert (row.peak_bytes, row.capacity_bytes, row.headroom_bytes, row.fragmentation) == (None,) * 4

    def test_no_row_where_nothing_is_known(self):
        trace = TraceBuilder().step(0, 0, STEP).op("aten::mm", 10, 9000).build()
        assert memory_rows(compared(trace), {}) == ()


class TestStrips:
    def test_clocks_are_aligned_and_time_begins_with_the_first_used_step(self):
        events = ((50, 0, 100, 400), (STEP + 500, 0, 300, 400))
        first, second = memory_timelines(compared(gpu_rank(0, *events), gpu_rank(1, *events, shift=50_000_000)))
        for strip in (first, second):
            assert strip.time_us == (0.05, 10.5, 20.0)
            assert strip.allocated_bytes == (100, 300, 300)
            assert strip.reserved_bytes == (400, 400, 400)
        assert (first.rank, second.rank, first.device) == (0, 1, 0)

    def test_a_rank_with_an_unaligned_clock_begins_at_its_own_zero(self):
        alone = TraceBuilder(rank=1, world_size=2)
        for at in (10**15, 10**15 + STEP):
            alone.step((at - 10**15) // STEP, at, at + STEP).launched("gemm", at + 10, at + 100, at + 9000)
        strips = memory_timelines(
            compared(gpu_rank(0, (50, 0, 1, 2)), replace(alone.build(), memory=counter((10**15 + 70, 0, 1, 2))))
        )
        assert [strip.time_us[0] for strip in strips] == [0.05, 0.07]

    def test_of_many_ranks_the_fullest_are_shown(self):
        ranks = MAX_RANKS + 8
        traces = [gpu_rank(rank, (50, 0, 1, 10**6 + (rank == 17)), ranks=ranks) for rank in range(ranks)]
        strips = memory_timelines(compared(*traces))
        assert len(strips) == MAX_RANKS
        assert {strip.rank for strip in strips} >= {17, ranks - 1}

    def test_none_without_allocator_events(self):
        assert memory_timelines(compared(gpu_rank(0, ranks=1))) == ()


@pytest.mark.skipif(not H100.is_file(), reason="no folder of real traces beside the checkout")
def test_a_real_recording_s_peaks_and_extremes():
    events: list[dict[str, Any]] = [
        event["args"]
        for event in json.loads(gzip.decompress(H100.read_bytes()))["traceEvents"]
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 1
    ]
    result = align_job({0: analyze_rank(readers.read(H100))})
    (row,), (strip,) = memory_rows(result, {}), memory_timelines(result)
    assert row.peak_bytes == max(args["Total Reserved"] for args in events)
    assert row.allocated_peak_bytes == max(args["Total Allocated"] for args in events) == max(strip.allocated_bytes)
    assert min(strip.allocated_bytes) == min(args["Total Allocated"] for args in events)
    assert len(strip.time_us) < 0.4 * len(events)
