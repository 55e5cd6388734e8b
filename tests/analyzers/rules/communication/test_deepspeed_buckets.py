"""DeepSpeed's communication settings: fires where reductions stand in the way, or pieces are too small."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perfscope.analyzers.rules.communication import deepspeed_buckets
from perfscope.analyzers.rules.context import RuleContext
from perfscope.recording.metadata import RunMetadata
from perfscope.recording.vocabulary import REDUCE
from perfscope.results.findings import Obtained
from perfscope.results.rows import CollectiveRow, CostRow
from perfscope.results.tables import ModuleRow
from tests.analyzers.rules.jobs import MIB, Analyzed, analyze, breakdown, changed, context
from tests.analyzers.whatif.fsdp_variants import gathers_late, waits_for_reductions
from tests.generator import JobSpec, ModelSpec, NetworkSpec

# What DeepSpeed's engine does at stage 3 without overlap is what this FSDP does.
SPEC = JobSpec(
    strategy="fsdp",
    model=ModelSpec(layers=8, tokens=4096),
    network=NetworkSpec(busbw_gbps=60.0),
    end_sync=True,
    steps=6,
)


def engine(job: Analyzed, **zero: Any) -> RuleContext:
    recorded = job.with_settings(deepspeed={"zero_optimization": {"stage": 3, "overlap_comm": True, **zero}})
    return changed(recorded, strategy="zero3")


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


def test_reductions_that_nothing_overlaps(waiting: Analyzed) -> None:
    finding = deepspeed_buckets.evaluate(engine(waiting, overlap_comm=False))
    assert finding is not None
    assert (finding.action.setting, finding.action.old, finding.action.new) == ('"overlap_comm"', "false", "true")
    assert '{"zero_optimization": {"overlap_comm": true}}' in finding.action.how
    assert finding.whatif == {"zero.overlap_comm": "true"}
    assert finding.obtained is Obtained.REPLAYED
    assert "more memory per rank" in (finding.action.costs or "")
    assert deepspeed_buckets.evaluate(engine(waiting)) is None


def test_gathers_that_come_too_late(late: Analyzed) -> None:
    finding = deepspeed_buckets.evaluate(engine(late, stage3_prefetch_bucket_size=1_000_000))
    assert finding is not None
    assert finding.action.setting == '"stage3_prefetch_bucket_size"'
    # Two per layer, of 8 Mi elements each.
    assert (finding.action.old, finding.action.new) == ("1000000", str(16 * MIB))
    assert finding.whatif == {"fsdp.prefetch": "1"}
    # A bucket that holds the next layer already is not what is missing.
    assert deepspeed_buckets.evaluate(engine(late, stage3_prefetch_bucket_size=50_000_000)) is None


def moving(kind: str, size: int, count: int, alpha_us: float, **zero: Any) -> RuleContext:
    """A step of 100 ms, 20 ms of it exposed transfer; each collective takes 100 µs."""
    row = CollectiveRow(
        group="0", ranks=(0, 1), kind=kind, dtype="bfloat16", bytes=size, count=8 * count, transfer_us=100.0,
        wait_us=0.0, algbw_gbps=1.0, busbw_gbps=1.0, last_arriver={},
    )  # fmt: skip
    cost = CostRow(group="0", kind=kind, alpha_us=alpha_us, busbw_gbps=10.0, residual=0.0)
    runs = {0: RunMetadata(settings={"deepspeed": {"zero_optimization": zero}})}
    ranks = [breakdown(rank, exposed_comm_transfer=20_000.0) for rank in (0, 1)]
    return context(*ranks, collectives=(row,), cost_model=(cost,), runs=runs, strategy="zero2")


def test_small_reductions_need_a_larger_bucket() -> None:
    finding = deepspeed_buckets.evaluate(moving("reduce_scatter", MIB, 150, 80.0, stage=2, reduce_bucket_size=500_000))
    assert finding is not None
    assert (finding.action.setting, finding.action.old, finding.action.new) == (
        '"reduce_bucket_size"', "500000", "8400000",
    )  # fmt: skip
    # 16 times as much takes 320 µs more, four starts. It saves 15 of 16 of 150 starts of 80 µs.
    assert finding.ceiling == pytest.approx(100 / 88.75 - 1)
    # Five pieces become one; all of them are larger than the bucket.
    few = deepspeed_buckets.evaluate(moving("reduce_scatter", MIB, 5, 2_000.0, stage=2, reduce_bucket_size=2_000))
    assert few is not None
    assert few.action.new == "2700000"  # 2,621,440 elements
    # The bucket holds far more than what is sent: something else keeps it small. Or moving it is what takes time.
    assert deepspeed_buckets.evaluate(moving("reduce_scatter", MIB, 150, 80.0, stage=2, reduce_bucket_size=5e8)) is None
    slow = moving("reduce_scatter", MIB, 150, 40.0, stage=2, reduce_bucket_size=500_000)
    assert deepspeed_buckets.evaluate(slow) is None


def test_what_small_ones_take_between_cpus_is_latency() -> None:
    """Medians leave out that each of them may find its cores taken; on average even the smallest do."""
    case = moving("all_reduce", MIB, 150, 20.0, stage=2, reduce_bucket_size=500_000)
    biases = replace(case.summary.collectives[0], bytes=1024, transfer_us=90.0)
    case = changed(case, collectives=(*case.summary.collectives, biases))
    assert deepspeed_buckets.evaluate(case) is None  # on devices the fit holds
    on_cpus = changed(case, devices=("CPU", "CPU"))
    finding = deepspeed_buckets.evaluate(on_cpus)
    assert finding is not None
    shares = {one.what: one.value for one in finding.evidence}
    assert shares["latency as a share of the all_reduce time"] == pytest.approx(0.9)
    # Those that grow with their bytes do not become latency.
    quick = replace(biases, transfer_us=30.0)
    assert deepspeed_buckets.evaluate(changed(on_cpus, collectives=(on_cpus.summary.collectives[0], quick))) is None


def test_what_hosts_do_for_each_small_reduction_is_in_the_bound_on_cpus() -> None:
    case = moving("all_reduce", MIB, 150, 80.0, stage=2, reduce_bucket_size=500_000)
    reducing = ModuleRow(
        name=REDUCE, depth=1, count_per_step=150, host_us_per_step=43_000.0, device_us_per_step=0.0, kernels_per_step=0
    )
    case = changed(case, modules=(reducing,))
    on_cpus = deepspeed_buckets.evaluate(changed(case, devices=("CPU", "CPU")))
    assert on_cpus is not None
    assert on_cpus.ceiling == pytest.approx(100 / (100 - 43.0) - 1)
    on_devices = deepspeed_buckets.evaluate(case)
    assert on_devices is not None
    assert on_devices.ceiling == pytest.approx(100 / 88.75 - 1)
    # Latency alone is less than half of the transfers here: 9 of 15 ms move bytes, little of 43 and most of 16.
    for took_us, found in ((43_000.0, True), (16_000.0, False)):
        case = moving("all_reduce", MIB, 150, 40.0, stage=2, reduce_bucket_size=500_000)
        case = changed(case, modules=(replace(reducing, host_us_per_step=took_us),), devices=("CPU", "CPU"))
        assert (deepspeed_buckets.evaluate(case) is not None) is found


def test_small_parameters_stay_on_every_rank() -> None:
    case = moving("all_gather", 400_000, 150, 80.0, stage=3, stage3_param_persistence_threshold=100_000)
    finding = deepspeed_buckets.evaluate(case)
    assert finding is not None
    assert (finding.action.setting, finding.action.new) == ('"stage3_param_persistence_threshold"', "200001")
    assert "stay on every rank" in (finding.action.costs or "")


def test_only_deepspeed_is_advised() -> None:
    case = moving("reduce_scatter", MIB, 150, 80.0, stage=2, reduce_bucket_size=500_000)
    assert deepspeed_buckets.evaluate(changed(case, runs={})) is None
