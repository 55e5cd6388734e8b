"""Steps of loops that nothing marks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import perfscope
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.steps import BY_REPETITION, Steps
from perfscope.execution.serial import Serial
from perfscope.trace.trace import Category
from tests.real.sheets import of_chrome, raw_events
from tests.real.test_sheets import TRACES, written
from tests.traces import TraceBuilder

LAYERS = ("norm", "gemm", "gelu", "gemm", "add")
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def loop(*steps: list[str], pause: int = 500) -> TraceBuilder:
    """Each step pauses on the host and then launches its kernels, one in 20 ns; the device takes 10 for each."""
    builder, now = TraceBuilder(world_size=None), 0
    for kernels in steps:
        now += pause
        for kernel in kernels:
            builder.op("aten::op", now - 5, now + 5).launched(kernel, now, now + 3, now + 13)
            now += 20
    return builder


def steps_of(builder: TraceBuilder) -> Steps:
    return analyze_rank(builder.build()).steps


TRAINING = ["embed", *LAYERS * 3, "loss", *LAYERS[::-1] * 3, *["adam"] * 4]


def test_a_step_begins_with_the_pause_before_its_kernels():
    length = 500 + 20 * len(TRAINING)
    steps = steps_of(loop(*[TRAINING] * 4))
    assert steps.source == BY_REPETITION
    assert steps.number.tolist() == [0, 1, 2, 3]
    assert (steps.end_ns - steps.start_ns).tolist() == [length] * 4


def test_a_recording_that_begins_and_ends_within_a_step_has_the_whole_ones():
    steps = steps_of(loop(TRAINING[20:], *[TRAINING] * 3, TRAINING[:12]))
    assert (steps.end_ns - steps.start_ns).tolist() == [500 + 20 * len(TRAINING)] * 3


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([TRAINING] * 2, id="two steps"),
        pytest.param([["embed", *LAYERS * 30, "head"]], id="the layers of one step"),
        pytest.param([["gemm"]] * 50, id="one operator again and again"),
        pytest.param([TRAINING, TRAINING[:-7], TRAINING[3:], TRAINING], id="steps that differ"),
    ],
)
def test_no_repetition_that_is_plain_makes_one_window(steps):
    assert not steps_of(loop(*steps)).marked


def test_micro_batches_are_no_steps():
    batch = ["embed", *LAYERS * 3]
    steps = steps_of(loop(*[[*batch * 4, *["adam"] * 4]] * 4))
    assert len(steps) == 4


def test_kernels_of_one_graph_are_of_one_step():
    """A graph of three times the same ten kernels per step: the kernels repeat after ten, the launches after thirty.

    What the host did before the first launch is not known, so that step is not whole.
    """
    builder = TraceBuilder(world_size=None)
    for step in range(6):
        now = 10_000 * step
        builder.call("cudaGraphLaunch", now, now + 20, correlation=step + 1)
        for at in range(30):
            start = now + 30 + 20 * at
            builder.event(
                LAYERS[at % 5] + str(at % 10), Category.KERNEL, start, start + 10, device=0, stream=7,
                correlation=step + 1,
            )  # fmt: skip
    steps = steps_of(builder)
    assert steps.number.tolist() == list(range(5))
    assert (np.diff(steps.start_ns)[1:] == 10_000).all()


REDUCED = ["embed", *LAYERS * 3, "loss", *LAYERS[::-1] * 2, NCCL, *LAYERS[::-1], NCCL, *["fused_adam"] * 2, "norm"]
SENT = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


@pytest.mark.parametrize("paused", [0, 7, 30])
@pytest.mark.parametrize(
    ("kernels", "first"),
    [
        pytest.param(REDUCED, "norm", id="behind the optimizer"),
        pytest.param([name for name in REDUCED if "adam" not in name], "embed", id="the one kernel of its name"),
        pytest.param([SENT if name == NCCL else name for name in REDUCED], "norm", id="a stage of a pipeline"),
    ],
)
def test_ranks_that_communicate_begin_their_steps_with_the_same_kernel(paused: int, kernels: list[str], first: str):
    """Wherever the host of a rank pauses for longest in its loop."""
    turned = kernels[paused:] + kernels[:paused]
    trace = loop(*[turned] * 5).build()
    steps = analyze_rank(trace).steps
    assert steps.source == BY_REPETITION
    assert len(steps) >= 3
    launched = trace.rows(Category.KERNEL)
    called = np.sort(trace.start_ns[trace.rows(Category.RUNTIME)])
    following = launched[np.searchsorted(called, steps.host_start_ns)]
    assert {trace.name_of(int(row)) for row in following} == {first}


@pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(
            [name for name in REDUCED if "adam" not in name] + [SENT], id="stages that launch different kernels"
        ),
        pytest.param([NCCL, *"aabbb", NCCL, *"bbaaa"], id="two places alike"),
    ],
)
def test_ranks_that_communicate_are_one_window_where_no_kernel_is_known_to_be_first_on_all(kernels: list[str]):
    assert not steps_of(loop(*[kernels] * 5)).marked


def test_a_kernel_that_is_launched_in_each_micro_batch_shows_steps_of_many():
    batch = ["embed", *LAYERS * 3, SENT]
    steps = steps_of(loop(*[[*batch * 16, *["fused_adam"] * 20]] * 4))
    assert len(steps) == 4


@pytest.mark.scale
@pytest.mark.skipif(not TRACES.is_dir(), reason="no folder of real traces beside the checkout")
@pytest.mark.parametrize("workers", [0, 4])
def test_a_real_training_without_its_marks_has_the_same_steps(workers: int, tmp_path: Path) -> None:
    path = TRACES / f"resnet50_workers_{workers}" / "worker0.pt.trace.json.gz"
    own = of_chrome(path)
    kept = [event for event in raw_events(path) if not event["name"].startswith(("ProfilerStep#", "Optimizer."))]
    summary = perfscope.analyze(written(kept, tmp_path), executor=Serial())
    assert "steps_by_repetition" in {note.kind for note in summary.notes}
    assert summary.job.steps == (0, 1, 2, 3, 4, 5)
    true = [(end - begin) / 1e3 for begin, end in own.windows()]
    # The marks are some µs away from the longest pause. Nothing shows when the first step began on the host.
    assert summary.job.step_time_us_per_step[1:] == pytest.approx(true[1:], rel=0.01)
