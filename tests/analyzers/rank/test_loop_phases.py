"""In which phase of the loop a host pauses, against answers by hand."""

from __future__ import annotations

import pytest

from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.loop_phases import IN_BACKWARD
from tests.traces import TraceBuilder

MS = 1_000_000
FORWARD, BACKWARD, OPTIMIZER = "perfscope::forward", "perfscope::backward", "perfscope::optimizer"


def named(builder: TraceBuilder) -> dict[str, int]:
    """ms of each named part of the host's time."""
    found = analyze_rank(builder.build()).named_host
    return {name: round(part.measure() / MS) for name, part in found.items() if part.measure() >= MS / 2}


def step(*ranges: tuple[str, int, int], operators: tuple[int, ...]) -> TraceBuilder:
    """Two steps of 100 ms on a CPU with these ranges (ms) and operators of 1 ms at these times."""
    builder = TraceBuilder(device_name="")
    for number in range(2):
        at = 100 * number
        builder.step(number, at * MS, (at + 100) * MS)
        for name, start, end in ranges:
            builder.note(name, (at + start) * MS, (at + end) * MS)
        for start in operators:
            builder.op("aten::mm", (at + start) * MS, (at + start + 1) * MS)
    return builder


def test_a_pause_belongs_to_the_phase_around_it_or_to_the_loop_between_two():
    """Operators of 1 ms; between them the host pauses::

    forward [10      30) .. backward [40      60) .. optimizer [70   80) ..
    op       10    20  29            40   45   59            70      79
    """
    ranges = (FORWARD, 10, 30), (BACKWARD, 40, 60), (OPTIMIZER, 70, 80)
    found = named(step(*ranges, operators=(10, 20, 29, 40, 45, 59, 70, 79)))
    assert found == {
        "the forward": 2 * 17,
        "the backward": 2 * 17,
        "the optimizer's step": 2 * 8,
        "the loop between forward and backward": 2 * 10,
        "the loop between backward and optimizer": 2 * 10,
        "the loop between optimizer and forward": 30,
    }


def test_the_loop_around_a_phase_that_no_range_marks_is_not_called_a_loop_between_others():
    """DDP's own range and the optimizer's are recorded, the backward is not: 30 to 70 holds it."""
    ranges = ("DistributedDataParallel.forward", 10, 30), ("Optimizer.step#SGD.step", 70, 80)
    found = named(step(*ranges, operators=(10, 29, 40, 69, 70, 79)))
    assert found["the backward or the loop around it"] == 2 * (10 + 28)
    assert "the loop between forward and optimizer" not in found


def test_a_forward_inside_a_backward_is_no_neighbour():
    """Recomputation: the backward calls a forward at 45, which pauses for 8 ms."""
    ranges = (FORWARD, 10, 30), (BACKWARD, 40, 60), (FORWARD, 44, 55), (OPTIMIZER, 60, 70)
    found = named(step(*ranges, operators=(10, 29, 40, 44, 54, 59, 60, 69)))
    assert found["the forward"] == 2 * (18 + 9)
    assert found["the backward"] == 2 * (3 + 4)
    assert [name for name in found if name.startswith("the loop")] == [
        "the loop between optimizer and forward", "the loop between forward and backward",
    ]  # fmt: skip


def test_two_models_forwards_follow_on_each_other():
    ranges = (FORWARD, 10, 20), (FORWARD, 40, 50), (BACKWARD, 50, 60), (OPTIMIZER, 60, 70)
    found = named(step(*ranges, operators=(10, 19, 40, 49, 50, 59, 60, 69)))
    assert found["the loop between two forwards"] == 2 * 20


def test_without_any_range_nothing_is_named():
    assert named(step(operators=(10, 40, 70))) == {}


def test_time_between_operators_is_counted_by_phase_with_the_operators_of_each():
    """As in the first test. The 10 ms before the first forward lie between no two phases."""
    ranges = (FORWARD, 10, 30), (BACKWARD, 40, 60), (OPTIMIZER, 70, 80)
    builder = step(*ranges, operators=(10, 20, 29, 40, 45, 59, 70, 79))
    gaps = analyze_rank(builder.build()).tables.gaps
    found = dict(zip(gaps.names, zip(gaps.count.tolist(), (gaps.host_ns // MS).tolist(), strict=True), strict=True))
    assert found["the forward"] == ([3, 3], [17, 17])
    assert found["the backward"] == ([3, 3], [17, 17])
    assert found["the optimizer's step"] == ([2, 2], [8, 8])
    assert found["the loop between forward and backward"] == ([0, 0], [10, 10])
    assert found["the loop between optimizer and forward"] == ([0, 0], [20, 10])
    assert (gaps.host_ns.sum(axis=0) // MS).tolist() == [92, 92]


def test_a_rank_with_a_device_has_no_time_between_operators():
    builder = TraceBuilder().step(1, 0, 10 * MS).launched("gemm", 1, 2 * MS, 3 * MS)
    assert analyze_rank(builder.build()).tables.gaps.names == ()


@pytest.mark.parametrize("on_device", [False, True])
def test_a_hook_in_the_backward_is_a_pause_there_on_cpus(on_device: bool) -> None:
    """The engine's range around the gradient's accumulation covers the hook before it. With a device the engine's work
    counts as launching.
    """
    builder = TraceBuilder(device_name="").step(1, 0, 50 * MS).note(FORWARD, 0, MS).op("aten::mm", 0, MS)
    builder.note(BACKWARD, 2 * MS, 45 * MS).op("aten::mm", 2 * MS, 10 * MS)
    builder.op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 10 * MS, 41 * MS)
    builder.op("torch::autograd::AccumulateGrad", 40 * MS, 41 * MS).op("aten::mm", 41 * MS, 45 * MS)
    builder.note("Optimizer.step#SGD.step", 45 * MS, 50 * MS).op("aten::add_", 45 * MS, 50 * MS)
    if on_device:
        builder.launched("gemm", MS // 2, MS // 2 + 10, MS)
    assert named(builder).get(IN_BACKWARD, 0) == (0 if on_device else 30)
