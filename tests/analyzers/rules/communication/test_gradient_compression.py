"""Gradients in 16 bits: fires on exposed, bandwidth-bound all-reduces of fp32 gradients."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from perfscope.analyzers.rank.collectives.communication import dtype_of_kernel
from perfscope.analyzers.rules.communication import gradient_compression
from perfscope.recording.metadata import DeviceMetadata, RunMetadata
from perfscope.results.findings import Obtained, Prediction
from tests.analyzers.rules.jobs import Analyzed, analyze, changed
from tests.generator import JobSpec, ModelSpec, NetworkSpec

SLOW = JobSpec(
    model=ModelSpec(layers=6, tokens=4096, element_bytes=4),
    network=NetworkSpec(busbw_gbps=30.0),
    end_sync=True,
    steps=6,
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    return analyze(SLOW, tmp_path_factory.mktemp("slow"))


def test_fires_with_what_to_type_and_what_it_brings(job: Analyzed) -> None:
    finding = gradient_compression.evaluate(job.context)
    assert finding is not None
    assert finding.rule in job.rules
    assert (finding.action.old, finding.action.new) == ("none", "bf16_compress_hook")
    assert "register_comm_hook(state=None, hook=default_hooks.bf16_compress_hook)" in finding.action.how
    assert "loss curves" in (finding.action.costs or "")
    assert finding.whatif == {"ddp.comm_dtype": "bf16"}
    assert finding.obtained is Obtained.REPLAYED
    assert finding.predicted_step_us is not None
    assert finding.predicted_step_us.mid < 0.9 * job.context.step_time_us
    assert any(entry.what.startswith("fp32 gradient bytes") for entry in finding.evidence)


@pytest.mark.parametrize(
    ("framework", "settings", "typed"),
    [
        (
            "accelerate",
            {"mixed_precision": "no"},
            "DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)",
        ),
        ("lightning", {"fabric": True}, "model._forward_module.register_comm_hook("),
        ("lightning", {"strategy": "ddp"}, "DDPStrategy(ddp_comm_hook=default_hooks.bf16_compress_hook)"),
    ],
)
def test_is_written_as_the_framework_writes_it(
    job: Analyzed, framework: str, settings: dict[str, object], typed: str
) -> None:
    runs = {
        rank: RunMetadata(rank=rank, settings={framework: settings}, device=DeviceMetadata(type="cuda"))
        for rank in job.context.ranks
    }
    finding = gradient_compression.evaluate(changed(job.context, runs=runs))
    assert finding is not None
    assert typed in finding.action.how


def test_devices_without_bf16_take_fp16(job: Analyzed) -> None:
    finding = gradient_compression.evaluate(changed(job.context, devices=("Tesla V100-SXM2-32GB",)))
    assert finding is not None
    assert finding.action.new == "fp16_compress_hook"
    assert "65,504" in (finding.action.costs or "")


def test_silent_where_it_brings_nothing_or_is_done(job: Analyzed, tmp_path: Path) -> None:
    on_device = DeviceMetadata(type="cuda")
    hooked = {0: RunMetadata(settings={"ddp": {"comm_hook": "bf16_compress_hook"}}, device=on_device)}
    assert gradient_compression.evaluate(changed(job.context, runs=hooked)) is None
    # The same bytes at the same rate in halves already; and starting collectives is what takes time.
    halves = analyze(dataclasses.replace(SLOW, model=ModelSpec(layers=6, tokens=4096)), tmp_path / "halves")
    assert gradient_compression.RULE not in halves.rules
    starts = NetworkSpec(busbw_gbps=600.0, alpha_ns=2_000_000)
    latency = analyze(dataclasses.replace(SLOW, network=starts), tmp_path / "latency")
    assert gradient_compression.RULE not in latency.rules
    assert latency.context.typical_us("exposed_comm_transfer") > 0.05 * latency.context.step_time_us


@pytest.mark.parametrize(("high", "found"), [(0.96, False), (0.94, True), (None, False)])
def test_on_cpus_even_the_high_end_must_save_time(job: Analyzed, high: float | None, found: bool) -> None:
    """Gloo adds halves one by one, which may take what a quick link saves; a slow link saves more than that."""
    step = job.context.step_time_us
    answer = None if high is None else Prediction(low=0.5 * step, mid=0.6 * step, high=high * step)
    on_cpus = changed(job.context, devices=("CPU",), predict=lambda _: answer)
    assert (gradient_compression.evaluate(on_cpus) is not None) is found


def test_without_sizes_it_is_a_bound(job: Analyzed) -> None:
    """Kernels' names tell the type (``AllReduce_Sum_f32``), and a long transfer is no matter of latency."""
    rows = tuple(dataclasses.replace(row, bytes=None) for row in job.context.summary.collectives)
    without = changed(job.context, collectives=rows, predict=lambda settings: None)
    finding = gradient_compression.evaluate(without)
    assert finding is not None
    assert finding.obtained is Obtained.BOUNDED
    half = job.context.exposed_transfer_us / 2
    assert finding.ceiling == pytest.approx(half / (job.context.step_time_us - half))
    assert gradient_compression.evaluate(changed(without, devices=("CPU",))) is None
    short = tuple(dataclasses.replace(row, transfer_us=100.0) for row in rows)
    assert gradient_compression.evaluate(changed(without, collectives=short)) is None
    # Latency is 10 to 100 µs: less than half of 300.
    longer = tuple(dataclasses.replace(row, transfer_us=300.0) for row in rows)
    assert gradient_compression.evaluate(changed(without, collectives=longer)) is not None
    step = job.context.step_time_us
    same = Prediction(low=step, mid=step, high=step)
    assert gradient_compression.evaluate(changed(without, predict=lambda _: same)) is None


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "float32"),
        ("ncclKernel_AllReduce_RING_LL_Sum_half(ncclWorkElem)", "float16"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "bfloat16"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", None),
    ],
)
def test_the_kernel_tells_what_is_added(kernel: str, dtype: str | None) -> None:
    assert dtype_of_kernel(kernel) == dtype


def test_where_ddp_does_not_show_it_is_said_for_a_loop_too(job: Analyzed) -> None:
    """Traces of other tools show all-reduces of gradients, and not what reduces them."""
    finding = gradient_compression.evaluate(changed(job.context, strategy="data"))
    assert finding is not None
    assert (finding.action.old, finding.action.new) == ("fp32", "bf16")
    assert "register_comm_hook(" in finding.action.how
    assert "gradient.to(torch.bfloat16)" in finding.action.how
    recorded = {rank: RunMetadata(rank=rank) for rank in job.context.ranks}
    assert gradient_compression.evaluate(changed(job.context, strategy="data", runs=recorded)) is None
