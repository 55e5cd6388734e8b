"""How long operators take when nothing delays them: by the quickest call of each kind."""

from __future__ import annotations

import numpy as np

from perfscope.analyzers.rank.attribution import attribute
from perfscope.analyzers.rank.host_activity import host_activity, training_threads
from perfscope.analyzers.rank.launches import device_work
from perfscope.analyzers.rank.steps import find_steps
from perfscope.analyzers.rank.work.quickest import quickest_times
from perfscope.analyzers.rank.work.tables import QuickestTimes
from perfscope.recording.vocabulary import DATALOADER
from tests.traces import TraceBuilder

LARGE = [[256, 512], [512, 512]]
SMALL = [[4, 4], [4, 4]]


def times(builder: TraceBuilder) -> QuickestTimes:
    trace = builder.build()
    work = device_work(trace)
    steps = find_steps(trace, work, training_threads(trace, work))
    loading = host_activity(trace, work).loading
    return quickest_times(trace, attribute(trace, work, steps).operators, steps, loading, on_device=len(work) > 0)


def two_steps() -> TraceBuilder:
    return TraceBuilder().step(1, 0, 1000).step(2, 1000, 2000)


def test_every_call_counts_as_the_quickest_of_its_kind() -> None:
    built = two_steps()
    built.op("aten::mm", 0, 400, shapes=LARGE).op("aten::mm", 500, 550, shapes=LARGE)
    built.op("aten::mm", 1000, 1700, shapes=LARGE)
    found = times(built)
    np.testing.assert_array_equal(found.spread_ns, [100, 50])
    np.testing.assert_array_equal(found.alone_ns, [0, 0])


def test_other_sizes_are_another_kind_and_small_ones_run_on_one_thread() -> None:
    built = two_steps()
    built.op("aten::mm", 0, 400, shapes=LARGE).op("aten::mm", 500, 507, shapes=SMALL)
    built.op("aten::add", 600, 603, shapes=[[32767], [], []]).op("aten::add", 700, 705, shapes=[[32768], [], []])
    built.op("aten::_foreach_add_", 800, 811, shapes=[[[512, 512], [8]], [[512, 512], [8]], []])
    found = times(built)
    assert (found.spread_ns[0], found.alone_ns[0]) == (400 + 5 + 11, 7 + 3)


def test_what_an_operator_calls_counts_once() -> None:
    built = two_steps().op("aten::linear", 0, 100, shapes=LARGE).op("aten::addmm", 10, 90, shapes=LARGE)
    found = times(built)
    assert (found.spread_ns[0], found.alone_ns[0]) == (20 + 80, 0)


def test_what_loads_a_batch_does_not_count() -> None:
    built = two_steps().note(DATALOADER, 0, 100).op("aten::mm", 10, 90, shapes=LARGE)
    built.op("aten::mm", 200, 260, shapes=LARGE)
    np.testing.assert_array_equal(times(built).spread_ns, [60, 0])


def test_without_sizes_or_on_a_device_it_is_zero() -> None:
    for built in (
        two_steps().op("aten::mm", 0, 400),
        two_steps().op("aten::mm", 0, 400, shapes=LARGE).launched("gemm", 10, 20, 300),
    ):
        found = times(built)
        assert not found.spread_ns.any()
        assert not found.alone_ns.any()
