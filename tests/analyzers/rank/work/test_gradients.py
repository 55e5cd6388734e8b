"""Bytes of the gradients that a backward leaves, by autograd's functions with shapes recorded."""

from __future__ import annotations

from perfscope.analyzers.rank.host_activity import training_threads
from perfscope.analyzers.rank.launches import device_work
from perfscope.analyzers.rank.steps import Steps, find_steps
from perfscope.analyzers.rank.work.gradients import ReducedGradients, gradient_bytes, reduced_gradients
from perfscope.analyzers.whatif.bucketing import bucket_bytes, bucket_ends, parameter_bytes
from perfscope.trace.trace import Trace
from tests.traces import TraceBuilder

ACCUMULATE = "torch::autograd::AccumulateGrad"


def steps_of(trace: Trace) -> Steps:
    work = device_work(trace)
    return find_steps(trace, work, training_threads(trace, work))


def found(built: TraceBuilder) -> tuple[int, ...]:
    trace = built.build()
    return gradient_bytes(trace, steps_of(trace))


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


def test_hooks_show_how_many_gradients_are_in_each_bucket() -> None:
    """Two backwards of five gradients a step, the second of which is reduced: after the first, the third, the last."""
    built = TraceBuilder()
    for step in range(2):
        built.step(step, 10_000 * step, 10_000 * step + 9_900)
        for place in range(10):
            start = 10_000 * step + 100 + 500 * place
            built.op(f"autograd::engine::evaluate_function: {ACCUMULATE}", start, start + 400)
            if place in (5, 7, 9):
                built.op("c10d::allreduce_", start + 200, start + 300)
        built.op("c10d::allreduce_", 10_000 * step + 8_000, 10_000 * step + 8_100)  # the loop's own
    trace = built.build()
    reduced = reduced_gradients(trace, steps_of(trace))
    assert reduced == ReducedGradients(10, (6, 8, 10))
    assert reduced.in_buckets(2) == (1, 2, 2)
    assert reduced.in_buckets(3) == ()


def test_a_large_parameter_at_the_end_of_a_bucket_is_not_divided() -> None:
    """A bucket of 620 MiB holds six gradients: five fit its limit of 25 MiB, and the last one does not."""
    mib = 1 << 20
    buckets = [4 * mib, 26 * mib, 26 * mib, 620 * mib]
    sizes, known = parameter_bytes({}, buckets, counts=(1, 4, 4, 6)) or ([], True)
    assert not known
    assert (len(sizes), sum(sizes), sizes[0]) == (15, sum(buckets), 4 * mib)
    assert bucket_bytes(bucket_ends(float(sum(buckets)), 50 * mib, 50 * mib, sizes))[-1] > 595 * mib
