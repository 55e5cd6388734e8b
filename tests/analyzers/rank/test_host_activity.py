"""What the loop does between the optimizer's step and the next forward, against answers by hand."""

from __future__ import annotations

import pytest

from perfscope.analyzers.rank.host_activity import EVALUATING, host_activity
from perfscope.analyzers.rank.launches import device_work
from perfscope.trace.trace import NEVER
from tests.traces import AUTOGRAD, TraceBuilder


def between(builder: TraceBuilder) -> list[tuple[int, int]]:
    trace = builder.build()
    found = host_activity(trace, device_work(trace)).between
    return list(zip(found.start_ns.tolist(), found.end_ns.tolist(), strict=True))


def stepping() -> TraceBuilder:
    """Two iterations without a range around forwards; each metric is reduced after the optimizer's step."""
    builder = TraceBuilder()
    for at in (0, 1_000):
        builder.op("aten::mm", at + 100, at + 200)
        builder.op("autograd::engine::evaluate_function: MmBackward0", at + 300, at + 400, thread=AUTOGRAD)
        builder.note("Optimizer.step#AdamW.step", at + 500, at + 600)
        builder.op("aten::_foreach_add_", at + 510, at + 590)
        builder.op("c10d::allreduce_", at + 700, at + 710)
    return builder


NEXT = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
ZERO_GRAD = "Optimizer.zero_grad#AdamW.zero_grad"


@pytest.mark.parametrize(
    ("builder", "until"),
    [
        pytest.param(stepping(), 1_100, id="the model computes"),
        pytest.param(stepping().note(NEXT, 900, 950), 900, id="a batch is taken"),
        pytest.param(stepping().note(ZERO_GRAD, 850, 860).note(NEXT, 900, 950), 850, id="gradients go"),
        pytest.param(stepping().note(ZERO_GRAD, 620, 630).note(NEXT, 900, 950), 900, id="they went with the step"),
        pytest.param(stepping().step(6, 980, 1_980), 980, id="a step begins"),
        pytest.param(stepping().op("aten::embedding", 1_050, 1_060), 1_050, id="tokens are looked up"),
        pytest.param(stepping().note("FSDP::all_gather (0)", 1_020, 1_060), 1_020, id="parameters are gathered"),
        pytest.param(
            stepping().op("autograd::engine::evaluate_function: A", 800, 810), 800, id="another backward goes first"
        ),
        pytest.param(stepping().call("cudaGraphLaunch", 1_010, 1_020), 1_010, id="a graph is launched"),
        pytest.param(stepping().launched("ampere_sgemm_128x64", 1_015, 1_020, 1_050), 1_015, id="a product"),
        pytest.param(stepping().note("perfscope::forward", 1_090, 1_200), 1_090, id="a forward is marked"),
    ],
)  # fmt: skip
def test_the_loop_goes_on_until_what_comes_first(builder: TraceBuilder, until: int) -> None:
    assert (600, until) in between(builder)


def test_it_ends_with_the_trace_and_begins_with_a_step() -> None:
    """What comes before the first step of a trace may be the rest of a forward."""
    assert between(stepping()) == [(600, 1_100), (1_600, -NEVER)]
    assert between(TraceBuilder().op("c10d::allreduce_", 10, 20).op("aten::mm", 100, 200)) == []


def test_of_two_optimizers_the_last_one_ends_the_step() -> None:
    """What is between their steps, such as the norm of the second one's gradients, may be needed."""
    two = stepping().note("Optimizer.step#SGD.step", 720, 800)
    assert between(two)[0] == (800, 1_100)


@pytest.mark.parametrize(
    ("around", "pauses"),
    [
        ("## Call CompiledFxGraph fabc ##", [(100_001, 900_000)]),
        ("Torch-Compiled Region: 0/0", [(100_001, 900_000)]),
        ("autograd::engine::evaluate_function: CompiledFunctionBackward", [(100_001, 900_000)]),
        ("aten::bincount", []),  # an operator that works on the host
    ],
)
def test_a_host_pauses_within_compiled_code_too(around: str, pauses: list[tuple[int, int]]) -> None:
    """0.8 ms between two launches in one range, ns."""
    builder = TraceBuilder().op(around, 90_000, 1_000_000)
    builder.launched("triton_fused", 100_000, 120_000, 150_000).launched("triton_fused", 900_000, 920_000, 950_000)
    trace = builder.build()
    found = host_activity(trace, device_work(trace))
    assert list(zip(found.pauses.start_ns.tolist(), found.pauses.end_ns.tolist(), strict=True)) == pauses
    assert found.operators.measure() == 910_000 - sum(end - begin for begin, end in pauses)


@pytest.mark.parametrize(
    ("calls", "computing"),
    [
        ([], [(300_000, 1_100_000)]),  # an optimizer on the CPU
        ([(600_000, 610_000)], []),  # kernels are launched, 0.3 and 0.49 ms apart
        ([(310_000, 900_000)], []),  # one long call
    ],
)
def test_an_operator_that_calls_nothing_for_long_computes_itself(
    calls: list[tuple[int, int]], computing: list[tuple[int, int]]
) -> None:
    """Of the optimizer's 1 ms, ns; what a short operator inside it takes is its own."""
    builder = TraceBuilder().launched("gemm", 0, 10, 20).op("aten::_fused_adamw_", 100_000, 1_100_000)
    builder.op("aten::empty", 290_000, 300_000)
    for begin, end in calls:
        builder.call("cudaLaunchKernel", begin, end)
    trace = builder.build()
    found = host_activity(trace, device_work(trace)).computing
    assert list(zip(found.start_ns.tolist(), found.end_ns.tolist(), strict=True)) == computing


@pytest.mark.parametrize(
    ("named", "name"),
    [
        (("tokenize_batch", 90_000, 990_000), "tokenize_batch"),
        (("iteration", 0, 1_900_000), "the loop between optimizer and forward"),
        (("perfscope::gather", 90_000, 990_000), "the loop between optimizer and forward"),
    ],
    ids=["a script's own range", "of a whole step", "a recorder's"],
)
def test_a_pause_has_the_name_of_the_range_that_is_there_for_it(named: tuple[str, int, int], name: str) -> None:
    builder = TraceBuilder().note("Optimizer.step#SGD.step", 1_000, 80_000).op("aten::add_", 2_000, 90_000)
    builder.note(*named).note("perfscope::forward", 1_000_000, 1_900_000).op("aten::mm", 1_000_000, 1_800_000)
    trace = builder.build()
    found = {name: part.measure() for name, part in host_activity(trace, device_work(trace)).named.items()}
    assert max(found, key=found.__getitem__) == name
    assert found[name] == 910_000


def evaluating(
    products: int, wrapper: str = "DistributedDataParallel.forward", marked: str | None = None
) -> TraceBuilder:
    """Two iterations with forwards of three products; after the first optimizer the model computes ``products``."""
    builder = TraceBuilder()
    for at in (0, 10_000):
        builder.note(wrapper, at + 100, at + 900)
        for layer in range(3):
            builder.op("aten::addmm", at + 200 * (layer + 1), at + 200 * (layer + 1) + 100)
        builder.op("autograd::engine::evaluate_function: AddmmBackward0", at + 1_000, at + 1_500, thread=AUTOGRAD)
        builder.note("Optimizer.step#SGD.step", at + 2_000, at + 2_100)
    for layer in range(products):
        builder.op("aten::addmm", 3_000 + 500 * layer, 3_400 + 500 * layer)
    return builder if marked is None else builder.note(marked, 50, 950)


@pytest.mark.parametrize(
    ("builder", "found"),
    [
        pytest.param(evaluating(6), [(3_000, 5_900)], id="two batches"),
        pytest.param(evaluating(3), [(3_000, 4_400)], id="one batch"),
        pytest.param(evaluating(3, "FullyShardedDataParallel.forward"), [(3_000, 4_400)], id="under FSDP"),
        pytest.param(evaluating(2), [], id="less than a forward: a metric, say"),
        pytest.param(evaluating(0), [], id="nothing"),
        pytest.param(evaluating(6, "forward"), [], id="where forwards begin is not known"),
        pytest.param(evaluating(6, marked="perfscope::forward"), [], id="evaluations would have ranges"),
    ],
)
def test_a_forward_behind_the_optimizer_outside_the_wrapper_is_an_evaluation(
    builder: TraceBuilder, found: list[tuple[int, int]]
) -> None:
    trace = builder.build()
    named = host_activity(trace, device_work(trace)).named[EVALUATING]
    assert list(zip(named.start_ns.tolist(), named.end_ns.tolist(), strict=True)) == found
