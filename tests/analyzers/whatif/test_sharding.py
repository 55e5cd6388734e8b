"""Sharding off, on, and made worse or better by hand in the simulator, each predicted from the recording of another."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.whatif.change import BadSetting, CannotReplay, Context
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.sharding_recorded import fluctuation_ns
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.recording.metadata import ModelMetadata, RunMetadata
from tests.analyzers.whatif.fsdp_variants import (
    gathers_late,
    gathers_late_but_the_last,
    keeps_parameters,
    keeps_the_last,
    waits_for_reductions,
)
from tests.emulator.changes import apply
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import Cause, Job, Recording
from tests.generator import MIB, JobSpec, ModelSpec, NetworkSpec, cpu_job, simulate

pytestmark = pytest.mark.scale

SPEC = JobSpec(
    ranks=4, strategy="fsdp", model=ModelSpec(layers=8, tokens=4096), end_sync=True,
    network=NetworkSpec(busbw_gbps=60.0, alpha_ns=50_000),
)  # fmt: skip

DDP = replace(
    SPEC, strategy="ddp", steps=3, model=ModelSpec(layers=8, tokens=2048),
    network=NetworkSpec(busbw_gbps=40.0, alpha_ns=100_000),
)  # fmt: skip
LAYER = 2 * DDP.model.element_bytes * DDP.model.width * DDP.model.hidden
MODEL = ModelMetadata(
    parameter_bytes=8 * LAYER,
    trainable_bytes=8 * LAYER,
    trainable_sizes=(LAYER // 2,) * 16,
    block_sizes=(LAYER,) * 8,
)
SHARDED = ModelMetadata(parameter_bytes=8 * LAYER // 4)
"""The same as one of four ranks holds it."""
DEEPSPEED = {
    "deepspeed": {"config": {"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 25 * MIB // 2}}}
}
"""Reduces as the simulated jobs do: in buckets of 25 MiB of bf16, beside the backward."""

Change = Callable[[pytest.MonkeyPatch], None]


def sharded(strategy: str, spec: JobSpec = DDP) -> JobSpec:
    """The same job, each rank updating its quarter of the parameters."""
    model = replace(spec.model, optimizer_kernel_ns=spec.model.optimizer_kernel_ns // spec.ranks)
    return replace(spec, strategy=strategy, model=model)


def with_metadata(context: Context, **known: Any) -> Context:
    """The same recording, of which ``perfscope run`` knew this."""
    return replace(context, runs={rank: RunMetadata(rank=rank, **known) for rank in context.result.partials})


@dataclass(frozen=True)
class Question:
    """A recorded job with the metadata of its runs, the stage asked about, and the job that this makes of it."""

    recorded: JobSpec
    stage: str
    becomes: JobSpec
    metadata: dict[str, Any] = field(default_factory=dict)
    recorded_as: Change | None = None
    becomes_as: Change | None = None
    within: float = 0.02


_ZERO: dict[str, Any] = {"model": MODEL, "settings": DEEPSPEED}
_ACCUMULATING = replace(DDP, microbatches=3)
QUESTIONS = {
    "DDP to FULL_SHARD": Question(DDP, "3", sharded("fsdp"), {"model": MODEL}),
    "DDP to SHARD_GRAD_OP": Question(DDP, "2", sharded("fsdp"), {"model": MODEL}, becomes_as=keeps_parameters),
    "accumulating DDP to FULL_SHARD": Question(_ACCUMULATING, "3", sharded("fsdp", _ACCUMULATING), {"model": MODEL}),
    "accumulating DeepSpeed to stage 2": Question(_ACCUMULATING, "2", sharded("zero2", _ACCUMULATING), _ZERO),
    "DeepSpeed to stage 3": Question(DDP, "3", sharded("zero3"), _ZERO),
    "DeepSpeed to stage 2": Question(DDP, "2", sharded("zero2"), _ZERO),
    "DeepSpeed to stage 1": Question(DDP, "1", sharded("zero1"), _ZERO),
    "ZeRO-1 to 2": Question(sharded("zero1"), "2", sharded("zero2"), {**_ZERO, "strategies": ("zero1",)}),
    "ZeRO-1 to 3": Question(sharded("zero1"), "3", sharded("zero3"), {**_ZERO, "strategies": ("zero1",)}),
    "ZeRO-2 to 3": Question(sharded("zero2"), "3", sharded("zero3"), {**_ZERO, "strategies": ("zero2",)}),
    "ZeRO-3 to 2": Question(
        sharded("zero3"),
        "2",
        sharded("zero2"),
        {"model": SHARDED, "strategies": ("zero3",), "settings": DEEPSPEED},
        within=0.04,
    ),
    "ZeRO-3 to 1": Question(
        sharded("zero3"),
        "1",
        sharded("zero1"),
        {"model": SHARDED, "strategies": ("zero3",), "settings": DEEPSPEED},
        within=0.05,
    ),
    "ZeRO-3 of a small model, which keeps it for the backward, to 2": Question(
        sharded("zero3"),
        "2",
        sharded("zero2"),
        {"model": SHARDED, "strategies": ("zero3",), "settings": DEEPSPEED},
        recorded_as=keeps_parameters,
        within=0.04,
    ),
    "ZeRO-3 to plain": Question(sharded("zero3"), "0", DDP, {"model": SHARDED, "strategies": ("zero3",)}, within=0.04),
    "SHARD_GRAD_OP to FULL_SHARD": Question(
        sharded("fsdp"), "3", sharded("fsdp"), {"model": SHARDED, "strategies": ("fsdp",)}, recorded_as=keeps_parameters
    ),
    "a trace alone, SHARD_GRAD_OP to FULL_SHARD": Question(
        sharded("fsdp"), "3", sharded("fsdp"), recorded_as=keeps_parameters
    ),
    # Which units would be gathered is assumed.
    "a trace alone, DDP to SHARD_GRAD_OP": Question(
        DDP, "2", sharded("fsdp"), becomes_as=keeps_parameters, within=0.05
    ),
    "a trace alone, DDP to FULL_SHARD": Question(DDP, "3", sharded("fsdp"), within=0.12),
}


def recorded(folder: Path, spec: JobSpec, change: Change | None = None) -> Context:
    with pytest.MonkeyPatch.context() as patch:
        if change is not None:
            change(patch)
        simulate(spec).write(folder)
    return context_of(folder)


def truth(spec: JobSpec, change: Change | None = None) -> float:
    with pytest.MonkeyPatch.context() as patch:
        if change is not None:
            change(patch)
        return simulate(spec).truth.step_time_ns


def test_gathering_one_layer_ahead(tmp_path: Path) -> None:
    found = predict(recorded(tmp_path, SPEC, gathers_late), {"fsdp.prefetch": "1"})
    assert found.mid_ns == pytest.approx(truth(SPEC), rel=0.05)
    assert found.mid_ns < 0.9 * found.measured_ns


def test_gathering_ahead_of_a_last_layer_that_stayed(tmp_path: Path) -> None:
    """The backward's first gather comes before the last layer's backward, not behind its reduction."""
    found = predict(recorded(tmp_path, SPEC, gathers_late_but_the_last), {"fsdp.prefetch": "1"})
    assert found.mid_ns == pytest.approx(truth(SPEC, keeps_the_last), rel=0.01)


def test_keeping_parameters_for_the_backward(tmp_path: Path) -> None:
    spec = replace(SPEC, network=NetworkSpec(busbw_gbps=20.0, alpha_ns=50_000))
    found = predict(recorded(tmp_path, spec), {"fsdp.reshard_after_forward": "false"})
    assert found.mid_ns == pytest.approx(truth(spec, keeps_parameters), rel=0.05)
    assert found.mid_ns < 0.95 * found.measured_ns


def test_reducing_beside_the_backward(tmp_path: Path) -> None:
    found = predict(recorded(tmp_path, SPEC, waits_for_reductions), {"zero.overlap_comm": "true"})
    assert found.mid_ns == pytest.approx(truth(SPEC), rel=0.05)
    assert found.mid_ns < 0.95 * found.measured_ns


def test_accumulation_reduces_once_for_several_batches(tmp_path: Path) -> None:
    spec = replace(SPEC, strategy="ddp", network=NetworkSpec(busbw_gbps=20.0, alpha_ns=50_000))
    context = recorded(tmp_path, spec)
    of_four = truth(replace(spec, microbatches=4)) / 4
    found = predict(context, {"batch.accumulation": "4"})
    # The simulated job's optimizer steps once in four batches, the replayed one's each time.
    assert found.mid_ns == pytest.approx(of_four, rel=0.06)
    assert found.mid_ns < 0.9 * found.measured_ns
    with pytest.raises(CannotReplay, match="only 8 steps"):
        predict(context, {"batch.accumulation": "9"})


def test_every_copy_of_a_tensor_parallel_model_accumulates(tmp_path: Path) -> None:
    # Each of the two parts of the layers has a data parallel group of its own.
    spec = replace(
        SPEC, strategy="ddp", tensor=2, ranks=8, steps=6, network=NetworkSpec(busbw_gbps=20.0, alpha_ns=20_000)
    )
    found = predict(recorded(tmp_path, spec), {"batch.accumulation": "2"})
    assert found.mid_ns == pytest.approx(truth(replace(spec, microbatches=2)) / 2, rel=0.06)
    assert found.mid_ns < 0.95 * found.measured_ns


def test_what_follows_the_optimizer_is_done_once(tmp_path: Path) -> None:
    # A pause, as where something is logged in every step.
    job = Job(noise=0.0, item_every=1, causes=(Cause("pause", 5e6, None, how="log"),), recording=Recording(steps=6))
    emulated = emulate(job)
    emulated.write(tmp_path)
    found = predict(context_of(str(tmp_path)), {"batch.accumulation": "2"})
    changed = apply(job, {"batch.accumulation": "2"})
    assert changed is not None
    took = step_ns(changed.job) / changed.batches / emulated.step_ns * found.measured_ns
    assert found.mid_ns == pytest.approx(took, rel=0.06)
    assert found.low_ns <= took <= found.high_ns
    assert found.high_ns - found.mid_ns >= 2.5e6


@pytest.mark.parametrize(
    ("setting", "value", "why"),
    [
        ("fsdp.prefetch", "1", "gathers of parameters"),
        ("fsdp.reshard_after_forward", "false", "not gathered twice"),
        ("fsdp.reshard_after_forward", "true", "does not show"),
        ("zero.overlap_comm", "true", "nothing waits"),
        ("zero.overlap_comm", "false", "does not show"),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path: Path, setting: str, value: str, why: str) -> None:
    context = recorded(tmp_path, replace(SPEC, strategy="ddp", steps=3))
    with pytest.raises(CannotReplay, match=why):
        predict(context, {setting: value})


@pytest.mark.parametrize(
    ("setting", "value"),
    [("fsdp.prefetch", "0"), ("fsdp.prefetch", "9"), ("zero.overlap_comm", "1"), ("batch.accumulation", "1")],
)
def test_values_that_make_no_sense(tmp_path: Path, setting: str, value: str) -> None:
    context = recorded(tmp_path, replace(SPEC, steps=3))
    with pytest.raises(BadSetting, match=setting):
        predict(context, {setting: value})


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, Change | None], Context]:
    """Every recorded job once."""
    jobs = {(repr(each.recorded), each.recorded_as): each.recorded for each in QUESTIONS.values()}
    return {key: recorded(tmp_path_factory.mktemp("job"), spec, key[1]) for key, spec in jobs.items()}


@pytest.fixture(scope="module")
def ddp(recordings: dict[tuple[str, Change | None], Context]) -> Context:
    return recordings[repr(DDP), None]


@pytest.mark.parametrize("name", QUESTIONS)
def test_another_stage_comes_true(recordings: dict[tuple[str, Change | None], Context], name: str) -> None:
    asked = QUESTIONS[name]
    context = recordings[repr(asked.recorded), asked.recorded_as]
    found = predict(
        with_metadata(context, **asked.metadata) if asked.metadata else context, {"zero.stage": asked.stage}
    )
    took = truth(asked.becomes, asked.becomes_as)
    assert found.mid_ns == pytest.approx(took, rel=asked.within)
    assert found.low_ns <= took <= found.high_ns
    assert found.high_ns - found.low_ns < found.mid_ns


def test_torch_s_sharded_optimizer_broadcasts_each_parameter(ddp: Context) -> None:
    # Nothing hides the broadcasts: they begin when the optimizer is done, and the next step needs them.
    found = predict(with_metadata(ddp, model=MODEL), {"zero.stage": "1"})
    model, wire = DDP.model, DDP.network
    broadcasts = 16 * (wire.alpha_ns + LAYER / 2 / wire.busbw_gbps)
    quicker = 0.75 * model.optimizer_kernels * model.optimizer_kernel_ns
    assert found.mid_ns == pytest.approx(found.measured_ns + broadcasts - quicker, rel=0.01)


def test_frozen_parameters_are_gathered_but_not_reduced(ddp: Context) -> None:
    frozen = replace(MODEL, parameter_bytes=3 * MODEL.parameter_bytes)
    all_trained, some = (predict(with_metadata(ddp, model=model), {"zero.stage": "3"}) for model in (MODEL, frozen))
    # Twice the model's bytes more, gathered twice, cannot all be hidden on a link that computation hides little of.
    more = 2 * 2 * 8 * LAYER * 0.75 / DDP.network.busbw_gbps
    assert 0.8 * more < some.mid_ns - all_trained.mid_ns < 1.1 * more


def test_the_stage_that_is_set_changes_nothing(ddp: Context) -> None:
    assert predict(ddp, {"zero.stage": "0"}).mid_ns == ddp.result.step_ns


def test_sharding_on_twice_the_bandwidth_is_refused_with_the_range(ddp: Context) -> None:
    network = NetworkSpec(busbw_gbps=80.0, alpha_ns=100_000)
    context, change = with_metadata(ddp, model=MODEL), {"zero.stage": "3", "network.bandwidth": "2x"}
    took = truth(replace(sharded("fsdp"), network=network))
    # The latency of gathers that nobody made yet is not known from one size of all-reduces, and decides here.
    with pytest.raises(CannotReplay, match="latency and bandwidth cannot be separated") as refused:
        predict(context, change)
    range_ms = re.search(r"from ([\d.]+) to ([\d.]+) ms", str(refused.value))
    assert range_ms is not None
    low, high = map(float, range_ms.groups())
    assert low * 1e6 <= took <= high * 1e6


def test_on_cpus_every_gather_and_reduction_blocks(tmp_path: Path) -> None:
    spec = cpu_job(ranks=2, steps=4, network=NetworkSpec(busbw_gbps=1.0, alpha_ns=100_000))
    job = simulate(spec)
    job.write(tmp_path)
    layers, layer = spec.model.layers, 2 * 4 * spec.model.width * spec.model.hidden
    model = ModelMetadata(trainable_bytes=layers * layer, block_sizes=(layer,) * layers)
    found = predict(with_metadata(context_of(tmp_path), model=model, backend="gloo"), {"zero.stage": "3"})
    # Over the wire as much as half an all-reduce, and a whole one; copied at 0.25 and 0.5 ns a byte.
    gather, reduce = (100_000 + (share + copying) * layer for share, copying in ((0.5, 0.25), (1.0, 0.5)))
    waited = sum(job.truth.mean_ns(0, row) for row in ("exposed_comm_wait", "exposed_comm_transfer"))
    # Half of the optimizer goes away.
    alone = found.measured_ns - waited - 0.5 * spec.model.optimizer_kernels * spec.model.optimizer_kernel_ns
    assert found.mid_ns == pytest.approx(alone + layers * (2 * gather + reduce), rel=0.02)


def test_ranks_whose_pace_fluctuates_wait_for_each_other_more_often(tmp_path: Path) -> None:
    noisy = with_metadata(recorded(tmp_path, replace(DDP, noise=0.05, seed=3)), model=MODEL)
    found = predict(noisy, {"zero.stage": "3"})
    took = truth(replace(sharded("fsdp"), noise=0.05, seed=4))
    assert found.mid_ns == pytest.approx(took, rel=0.05)
    assert found.low_ns <= took <= found.high_ns


@pytest.mark.parametrize(
    ("own", "ns"),
    [
        # What a rank has in all steps, or a step on all ranks, is no fluctuation.
        ({0: [10, 10, 10], 1: [15, 15, 15]}, 0.0),
        ({0: [10, 20, 30], 1: [15, 25, 35]}, 0.0),
        ({0: [10, 20], 1: [20, 10]}, 10.0),
        ({0: [10, 20], 1: [20]}, 0.0),
    ],
)
def test_what_ranks_do_not_have_in_common_is_fluctuation(own: dict[int, list[float]], ns: float) -> None:
    assert fluctuation_ns(own) == pytest.approx(ns)


def test_sharding_that_cannot_be_replayed_is_refused(ddp: Context, tmp_path: Path) -> None:
    partial_job = simulate(replace(DDP, steps=3))
    partial_job.write(tmp_path / "missing", ranks=[0, 1, 2])
    with pytest.raises(CannotReplay, match="record all ranks"):
        predict(context_of(tmp_path / "missing"), {"zero.stage": "3"})
    with pytest.raises(CannotReplay, match="pipeline or tensor"):
        predict(with_metadata(ddp, strategies=("ddp", "tensor")), {"zero.stage": "3"})
    single = recorded(tmp_path / "single", replace(DDP, ranks=1, steps=3))
    with pytest.raises(CannotReplay, match="record with shapes"):
        predict(single, {"zero.stage": "3"})
    shallow = recorded(tmp_path / "zero2", replace(DDP, strategy="zero2", steps=3))
    with pytest.raises(CannotReplay, match="stage 1 or 2"):
        predict(shallow, {"zero.stage": "0"})
