"""Bytes of the gradients that a backward leaves, by autograd's functions with shapes recorded."""

from __future__ import annotations

from perfscope.analyzers.rank.host_activity import training_threads
from perfscope.analyzers.rank.launches import device_work
from perfscope.analyzers.rank.steps import find_steps
from perfscope.analyzers.rank.work.gradients import gradient_bytes
from perfscope.analyzers.whatif.bucketing import bucket_bytes, bucket_ends, parameter_bytes
from tests.traces import TraceBuilder

ACCUMULATE = "torch::autograd::AccumulateGrad"


def found(built: TraceBuilder) -> tuple[int, ...]:
    trace = built.build()
    work = device_work(trace)
    return gradient_bytes(trace, find_steps(trace, work, training_threads(trace, work)))


def steps_with(*gradients: tuple[list[int], str]) -> TraceBuilder:
    built = TraceBuilder().step(1, 0, 1000).step(2, 1000, 2000).step(3, 2000, 3000)
    for step in range(3):
        for place, (shape, dtype) in enumerate(gradients):
            start = 1000 * step + 100 + 50 * place
            built.op(f"autograd::engine::evaluate_function: {ACCUMULATE}", start, start + 40)
            built.op(ACCUMULATE, start + 5, start + 35, shapes=[shape], types=[dtype])
    return built


def test_sizes_come_in_the_order_in_which_gradients_are_ready() -> None:
    built = steps_with(([256], "float"), ([256, 512], "float"), ([512], "c10::BFloat16"))
    assert found(built) == (1024, 524288, 1024)


def test_without_shapes_or_types_nothing_is_known() -> None:
    assert found(steps_with(([256], "float"), ([], ""))) == ()
    assert found(TraceBuilder().step(1, 0, 1000).op(ACCUMULATE, 100, 200)) == ()


def test_they_show_that_a_large_parameter_is_not_divided() -> None:
    """32 MiB in one bucket: of two parameters of 12 and 20 MiB no limit makes buckets of 5."""
    mib = 1 << 20
    traced = (12 * mib, 20 * mib)
    sizes, known = parameter_bytes({}, [32 * mib], [(), traced]) or ([], False)
    assert known
    assert bucket_bytes(bucket_ends(32.0 * mib, 5 * mib, 5 * mib, sizes)) == [12 * mib, 20 * mib]


def test_gradients_of_other_bytes_than_the_buckets_are_not_theirs() -> None:
    assert parameter_bytes({}, [32 << 20], [(1 << 20, 2 << 20)]) is None
