"""Shard less: fires where gathers of parameters are exposed and what they gather fits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.memory import sharding_stage
from perfscope.analyzers.rules.memory.memory_limit import ModelStates
from perfscope.recording.metadata import DeviceMetadata, ModelMetadata, RunMetadata
from perfscope.results.findings import Confidence, Obtained
from perfscope.results.rows import MemoryRow
from perfscope.results.tables import GroupRow, ModuleRow
from tests.analyzers.rules.jobs import GIB, Analyzed, analyze, changed
from tests.generator import JobSpec, ModelSpec, NetworkSpec

SLOW = JobSpec(
    strategy="fsdp", model=ModelSpec(layers=6, tokens=4096), network=NetworkSpec(busbw_gbps=20.0, alpha_ns=50_000),
    end_sync=True, steps=6,
)  # fmt: skip


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    return analyze(SLOW, tmp_path_factory.mktemp("fsdp"))


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    # At stage 2 nothing hides the gather: the slower the network, the more is saved.
    slower = NetworkSpec(busbw_gbps=10.0, alpha_ns=50_000)
    return analyze(dataclasses.replace(SLOW, strategy="zero3", network=slower), tmp_path_factory.mktemp("zero3"))


def known(job: Analyzed, free_gib: float = 40.0, **fsdp: Any) -> RuleContext:
    """As if the run had recorded its memory and settings."""
    memory = tuple(
        MemoryRow(rank=rank, peak_bytes=int((80 - free_gib) * GIB), capacity_bytes=80 * GIB,
                  headroom_bytes=int(free_gib * GIB))
        for rank in job.context.ranks
    )  # fmt: skip
    device = DeviceMetadata(type="cuda")
    runs = {
        rank: RunMetadata(
            rank=rank, device=device, settings={"fsdp": fsdp} if fsdp else {}, local_world_size=2,
            model=ModelMetadata(parameters=12 << 20, parameter_bytes=24 << 20, dtypes=("torch.bfloat16",)),
        )
        for rank in job.context.ranks
    }  # fmt: skip
    return changed(job.context, memory=memory, runs=runs)


def test_ranges_tell_which_fsdp_it_is(job: Analyzed) -> None:
    for name, setting in (
        ("FullyShardedDataParallel.forward", "FullyShardedDataParallel(sharding_strategy=…)"),
        ("FSDP::pre_forward (layers.0)", "fully_shard(reshard_after_forward=…)"),
    ):
        row = ModuleRow(
            name=name, depth=0, count_per_step=1.0, host_us_per_step=1.0, device_us_per_step=1.0, kernels_per_step=1.0
        )
        finding = sharding_stage.evaluate(changed(job.context, runs={}, modules=(row,)))
        assert finding is not None
        assert finding.action.setting == setting
        # Only of what is in use is said what to change.
        assert ("fully_shard" in finding.action.how) is setting.startswith("fully_shard")
        assert ("FullyShardedDataParallel" in finding.action.how) is not setting.startswith("fully_shard")


def test_stage_3_shows_in_its_gathers_where_nothing_names_it(zero: Analyzed) -> None:
    bare = changed(zero.context, runs={}, strategy="shard")
    finding = sharding_stage.evaluate(bare)
    assert finding is not None
    assert (finding.action.setting, finding.action.old, finding.action.new) == ("ZeRO's stage", "3", "2")
    assert (finding.obtained, finding.whatif) == (Obtained.REPLAYED, {"zero.stage": "2"})
    # Parameters that are gathered once are those of another stage.
    predict = bare.predict
    assert predict is not None
    once = changed(bare, predict=lambda change: None if "fsdp.reshard_after_forward" in change else predict(change))
    assert sharding_stage.evaluate(once) is None


def test_fsdp2_keeps_parameters(job: Analyzed) -> None:
    finding = sharding_stage.evaluate(known(job, version=2, reshard_after_forward=True))
    assert finding is not None
    assert (finding.action.setting, finding.action.old, finding.action.new) == (
        "fully_shard(reshard_after_forward=…)", "True", "False",
    )  # fmt: skip
    assert "reshard_after_forward=False" in finding.action.how
    assert "40.0 GiB are free" in (finding.action.costs or "")
    assert finding.obtained is Obtained.REPLAYED
    assert finding.whatif == {"fsdp.reshard_after_forward": "false"}
    assert finding.confidence is Confidence.MEDIUM
    assert finding.predicted_step_us is not None
    assert finding.predicted_step_us.mid < 0.95 * job.context.step_time_us


def test_fsdp1_names_its_strategy(job: Analyzed) -> None:
    finding = sharding_stage.evaluate(known(job, version=1, sharding_strategy="FULL_SHARD"))
    assert finding is not None
    assert (finding.action.old, finding.action.new) == ("FULL_SHARD", "SHARD_GRAD_OP")
    assert "sharding_strategy=ShardingStrategy.SHARD_GRAD_OP" in finding.action.how


def test_deepspeed_goes_to_stage_2(zero: Analyzed) -> None:
    finding = sharding_stage.evaluate(changed(known(zero), strategy="zero3"))
    assert finding is not None
    assert (finding.action.old, finding.action.new) == ("3", "2")
    assert '"zero_optimization": {"stage": 2}' in finding.action.how
    assert finding.whatif == {"zero.stage": "2"}


def test_unknown_memory_is_reported_and_lowers_confidence(job: Analyzed) -> None:
    finding = sharding_stage.evaluate(job.context)
    assert finding is not None
    assert finding.confidence is Confidence.LOW
    assert "check that they are free" in (finding.action.costs or "")


def test_silent_where_parameters_do_not_fit_or_gathers_hide(
    job: Analyzed, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # 96 MiB of parameters, three quarters of which are others': 72 MiB, and a tenth to spare.
    assert sharding_stage.evaluate(known(job, free_gib=0.09, version=2)) is not None
    assert sharding_stage.evaluate(known(job, free_gib=0.07, version=2)) is None
    quick = dataclasses.replace(SLOW, network=NetworkSpec(busbw_gbps=600.0))
    assert sharding_stage.RULE not in analyze(quick, tmp_path_factory.mktemp("quick")).rules


def test_with_accumulation_each_micro_batch_gathers_the_same_parameters(tmp_path: Path) -> None:
    accumulating = analyze(dataclasses.replace(SLOW, microbatches=4, steps=3), tmp_path)
    assert accumulating.context.microbatches == 4
    # 96 MiB of parameters, three quarters of which are others': 72 MiB, and a tenth to spare.
    finding = sharding_stage.evaluate(known(accumulating, free_gib=0.09, version=2))
    assert finding is not None
    takes = next(each.value for each in finding.evidence if each.what == "memory that the change takes per rank")
    assert takes == 72 << 20
    assert sharding_stage.evaluate(known(accumulating, free_gib=0.07, version=2)) is None


def test_across_hosts_shards_stay_inside_where_whole_parameters_do_not_fit(job: Analyzed) -> None:
    group = next(row for row in job.context.summary.groups if row.comm_us > 0)
    across = (dataclasses.replace(group, across_hosts=True),)
    tight = changed(known(job, free_gib=0.0, version=2), groups=across)
    assert sharding_stage.evaluate(tight) is None
    context = changed(known(job, version=2), groups=across, predict=None)
    finding = sharding_stage.evaluate(context)
    assert finding is not None
    assert (finding.action.setting, finding.action.new) == ("fully_shard(mesh=…)", "(2, 2)")
    assert 'mesh_dim_names=("replicate", "shard")' in finding.action.how
    assert finding.obtained is Obtained.BOUNDED
    inside: tuple[GroupRow, ...] = (dataclasses.replace(group, across_hosts=False),)
    assert sharding_stage.evaluate(changed(context, groups=inside)) is None


def test_a_bare_trace_is_told_to_shard_inside_its_hosts_where_memory_allows(job: Analyzed) -> None:
    """Four ranks on two hosts; neither the model nor its memory was recorded."""
    summary = job.context.summary
    group = next(row for row in summary.groups if row.comm_us > 0)
    hosts = tuple(dataclasses.replace(row, host=f"node{row.rank // 2}") for row in summary.time_breakdown)
    across = (dataclasses.replace(group, across_hosts=True),)
    bare = changed(job.context, groups=across, predict=None, runs={}, time_breakdown=hosts, memory=())
    finding = sharding_stage.evaluate(bare)
    assert finding is not None
    assert finding.action.new == "(2, 2)"
    assert finding.action.costs == "2 times as many bytes of the sharded state per rank; check that they are free."
    assert (finding.confidence, finding.obtained) == (Confidence.LOW, Obtained.BOUNDED)
    nowhere = tuple(dataclasses.replace(row, host="") for row in hosts)
    assert sharding_stage.evaluate(changed(bare, time_breakdown=nowhere)) is None


@pytest.mark.parametrize(("stage", "each"), [(0, 16.0), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)])
def test_memory_of_the_states_is_the_paper_s(stage: int, each: float) -> None:
    # Figure 1 of "ZeRO": 7.5 billion parameters on 64 ranks take 120, 31.4, 16.6 and 1.9 GB.
    states = ModelStates(7_500_000_000, (2.0, 2.0, 12.0))
    assert states.bytes_at(stage, 64) == pytest.approx(7.5e9 * each)


def test_sizes_are_not_needed(job: Analyzed) -> None:
    rows = tuple(dataclasses.replace(row, bytes=None) for row in job.context.summary.collectives)
    finding = sharding_stage.evaluate(changed(job.context, collectives=rows))
    assert finding is not None
    assert finding.confidence is Confidence.LOW
    assert "all parameters more memory" in (finding.action.costs or "")
    memory = known(job).summary.memory  # what it takes is not known, so neither whether it fits
    assert sharding_stage.evaluate(changed(job.context, collectives=rows, memory=memory)) is None
