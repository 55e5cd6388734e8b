"""Memory near its limit: reports what the next ZeRO stage would free."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.memory import memory_limit
from perfscope.recording.metadata import ModelMetadata, RunMetadata
from perfscope.results.findings import Obtained, Severity
from perfscope.results.rows import MemoryRow
from tests.analyzers.rules.jobs import GIB, analyze, breakdown, changed, context
from tests.generator import JobSpec, ModelSpec, NetworkSpec


def case(used_gib: float, retries: int = 0, strategy: str = "ddp", **settings: Any) -> RuleContext:
    """Four ranks that hold the same gibi of fp32 parameters: 4 + 4 + 8 GiB, on devices of 80 GiB."""
    model = ModelMetadata(parameters=GIB, parameter_bytes=4 * GIB, dtypes=("torch.float32",))
    memory = tuple(
        MemoryRow(
            rank=rank, peak_bytes=79 * GIB, capacity_bytes=80 * GIB, headroom_bytes=GIB, allocation_retries=retries,
            allocated_peak_bytes=int((used_gib if rank == 2 else 40) * GIB),
        )
        for rank in range(4)
    )  # fmt: skip
    runs = {rank: RunMetadata(rank=rank, model=model, settings=settings) for rank in range(4)}
    return context(*(breakdown(rank) for rank in range(4)), memory=memory, runs=runs, strategy=strategy)


def test_names_the_rank_the_stage_and_what_it_frees() -> None:
    finding = memory_limit.evaluate(case(used_gib=75))
    assert finding is not None
    assert finding.severity is Severity.INFO
    assert "Rank 2's memory" in finding.title
    assert "16.0 GiB of parameters, gradients and optimizer states" in finding.title
    assert (finding.action.old, finding.action.new) == ("0", "1")
    assert "ZeroRedundancyOptimizer" in finding.action.how
    # Three quarters of Adam's 8 GiB.
    assert "Frees 6.00 GiB" in (finding.action.costs or "")


def test_what_it_costs_is_replayed(tmp_path: Path) -> None:
    spec = JobSpec(
        ranks=4, steps=5, model=ModelSpec(layers=8, tokens=2048), network=NetworkSpec(busbw_gbps=40.0), end_sync=True
    )
    job = analyze(spec, tmp_path).context
    crowded = case(used_gib=75)
    # Of 64 MiB of weights alone stage 3 frees enough of the device: half a GiB.
    small = tuple(
        dataclasses.replace(row, capacity_bytes=GIB, allocated_peak_bytes=GIB) for row in crowded.summary.memory
    )
    model = ModelMetadata(
        parameters=1 << 26, parameter_bytes=1 << 27, trainable_bytes=1 << 27, block_sizes=(1 << 24,) * 8,
        dtypes=("torch.bfloat16",),
    )  # fmt: skip
    runs = {rank: RunMetadata(rank=rank, model=model) for rank in range(4)}
    finding = memory_limit.evaluate(changed(job, memory=small, runs=runs, strategy="ddp"))
    assert finding is not None
    assert finding.obtained is Obtained.REPLAYED
    assert finding.whatif == {"zero.stage": finding.action.new}
    assert finding.predicted_step_us is not None
    longer = finding.predicted_step_us.mid / job.step_time_us - 1
    assert longer > 0.05
    assert f"Predicted step time: {longer:.0%} longer (" in (finding.action.costs or "")


def test_what_cannot_be_replayed_is_taken_from_the_paper() -> None:
    for refused in (None, lambda _: None):
        finding = memory_limit.evaluate(changed(case(used_gib=75), predict=refused))
        assert finding is not None
        assert (finding.obtained, finding.whatif, finding.predicted_step_us) == (Obtained.BOUNDED, {}, None)
        assert "section 7" in (finding.action.costs or "")


def test_deepspeed_goes_one_stage_on() -> None:
    finding = memory_limit.evaluate(case(75, strategy="zero1", deepspeed={"zero_optimization": {"stage": 1}}))
    assert finding is not None
    assert (finding.action.old, finding.action.new) == ("1", "3")
    assert '{"stage": 3}' in finding.action.how


def test_an_allocator_that_starts_over_is_short_of_memory() -> None:
    assert memory_limit.evaluate(case(70, retries=3)) is not None


def test_silent_with_room_without_sizes_and_where_nothing_is_replicated() -> None:
    assert memory_limit.evaluate(case(73)) is None
    assert memory_limit.evaluate(case(75, strategy="fsdp")) is None
    assert memory_limit.evaluate(changed(case(75), strategy=("ddp", "tensor"))) is None
    assert memory_limit.evaluate(changed(case(75), runs={})) is None
    small = case(75)
    model = ModelMetadata(parameters=GIB // 16, dtypes=("torch.float32",))
    runs = {rank: dataclasses.replace(run, model=model) for rank, run in small.runs.items()}
    assert memory_limit.evaluate(changed(small, runs=runs)) is None


@pytest.mark.parametrize("retries", [0, 3])
def test_devices_alone_are_looked_at(retries: int) -> None:
    case_ = case(75, retries=retries)
    host = tuple(dataclasses.replace(row, kind="host") for row in case_.summary.memory)
    assert memory_limit.evaluate(changed(case_, memory=host)) is None
