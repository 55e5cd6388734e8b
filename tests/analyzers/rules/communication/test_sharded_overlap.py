"""Sharding that overlaps nothing, in traces without metadata and without FSDP's ranges."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from perfscope.analyzers.rules.communication import late_gradients, sharded_overlap
from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Obtained
from perfscope.results.rows import CollectiveRow
from perfscope.results.tables import GroupRow, ModuleRow
from tests.analyzers.rules.jobs import MIB, Analyzed, analyze, breakdown, changed, context, runs
from tests.analyzers.whatif.fsdp_variants import gathers_late, waits_for_reductions
from tests.generator import JobSpec, ModelSpec, NetworkSpec

# What ZeRO's stage 3 without overlap does is what this FSDP does.
SPEC = JobSpec(
    strategy="fsdp",
    model=ModelSpec(layers=8, tokens=4096),
    network=NetworkSpec(busbw_gbps=60.0),
    end_sync=True,
    steps=6,
)


def bare(job: Analyzed) -> RuleContext:
    """As if no rank had written metadata, and no range told who shards."""
    return changed(job.context, runs={}, strategy="shard")


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    with pytest.MonkeyPatch.context() as patch:
        waits_for_reductions(patch)
        return analyze(SPEC, tmp_path_factory.mktemp("waiting"))


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    with pytest.MonkeyPatch.context() as patch:
        gathers_late(patch)
        return analyze(SPEC, tmp_path_factory.mktemp("late"))


def test_reductions_that_the_backward_waits_for(waiting: Analyzed) -> None:
    finding = sharded_overlap.evaluate(bare(waiting))
    assert finding is not None
    assert finding.title.startswith("Gradients are reduced while the backward waits")
    assert (finding.obtained, finding.whatif) == (Obtained.REPLAYED, {"zero.overlap_comm": "true"})
    assert finding.action.how.startswith("Reduce gradients while the backward goes on (DeepSpeed: overlap_comm).")
    assert '{"zero_optimization": {"overlap_comm": true}}' in finding.action.how
    assert "In code of your own: " in finding.action.how


def test_gathers_that_come_too_late(late: Analyzed) -> None:
    finding = sharded_overlap.evaluate(bare(late))
    assert finding is not None
    assert finding.title.startswith("Layers wait for parameters")
    assert (finding.obtained, finding.whatif) == (Obtained.REPLAYED, {"fsdp.prefetch": "1"})
    # Two layers of 8 Mi elements each.
    assert f'"stage3_prefetch_bucket_size": {16 * MIB}' in finding.action.how


def test_wrappers_that_are_known_have_their_own_rules(late: Analyzed) -> None:
    assert sharded_overlap.evaluate(late.context) is None
    assert sharded_overlap.evaluate(changed(bare(late), runs=runs(4))) is None


def after_the_backward(
    kind: str = "reduce_scatter", strategy: str = "shard", described: str = "", hidden_us: float = 0.0, **others: Any
) -> RuleContext:
    """A step of 100 ms, 70 of it compute: 20 ms of reductions, 10 of gathers of half the bytes."""
    rows = [
        CollectiveRow(
            group="dp", ranks=(0, 1), kind=kind, dtype="float32", bytes=64 * MIB, count=8 * 8, transfer_us=us,
            wait_us=0.0, algbw_gbps=1.0, busbw_gbps=1.0, last_arriver={},
        )
        for kind, us in ((kind, 2_500.0), ("all_gather", 1_250.0))
    ]  # fmt: skip
    group = GroupRow(name="dp", ranks=(0, 1), role="data", role_from=described, comm_us=3e4, across_hosts=False)
    ranks = [
        dataclasses.replace(
            breakdown(rank, exposed_comm_transfer=30_000.0), hidden_comm_us=hidden_us, comm_us=3e4 + hidden_us
        )
        for rank in (0, 1)
    ]
    return context(*ranks, collectives=tuple(rows), groups=(group,), strategy=strategy, **others)


@pytest.mark.parametrize("case", [after_the_backward(), after_the_backward("all_reduce", "data")], ids=["2", "1"])
def test_all_after_the_backward_is_a_bound(case: RuleContext) -> None:
    finding = sharded_overlap.evaluate(case)
    assert finding is not None
    assert (finding.obtained, finding.confidence) == (Obtained.BOUNDED, "low")
    assert finding.ceiling == pytest.approx(100 / 70 - 1)
    assert "(Megatron-LM: --overlap-grad-reduce, --overlap-param-gather; DeepSpeed: overlap_comm)" in finding.action.how
    # DistributedDataParallel gathers no parameters.
    assert late_gradients.evaluate(case) is None


def test_names_in_the_trace_tell_the_framework() -> None:
    megatron = sharded_overlap.evaluate(after_the_backward(described="its description, DATA_PARALLEL_GROUP_WITH_CP"))
    assert megatron is not None
    assert "--overlap-grad-reduce" in megatron.action.how
    assert "DeepSpeed" not in megatron.action.how
    step = ModuleRow(
        name="Optimizer.step#DeepSpeedZeroOptimizer.step", depth=0, count_per_step=1.0, host_us_per_step=1.0,
        device_us_per_step=1.0, kernels_per_step=1.0,
    )  # fmt: skip
    deepspeed = sharded_overlap.evaluate(after_the_backward(modules=(step,)))
    assert deepspeed is not None
    assert "overlap_comm" in deepspeed.action.how
    assert "Megatron" not in deepspeed.action.how


def test_silent_where_it_overlaps_or_is_no_sharding() -> None:
    assert sharded_overlap.evaluate(after_the_backward(hidden_us=10_000.0)) is None
    assert sharded_overlap.evaluate(after_the_backward("all_reduce", "tensor")) is None
    assert sharded_overlap.evaluate(after_the_backward(missing_ranks=(2, 3))) is None
