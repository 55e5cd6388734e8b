"""A larger batch: reports what communication would cost per sample; information, no part of a plan."""

from __future__ import annotations

import dataclasses

import pytest

from perfscope.analyzers.rules.compute import batch_size
from perfscope.recording.metadata import DataLoaderMetadata, RunMetadata
from perfscope.results.findings import Obtained, Severity
from perfscope.results.rows import MemoryRow
from tests.analyzers.rules.jobs import GIB, Analyzed, analyze, changed
from tests.generator import JobSpec, ModelSpec, NetworkSpec

SLOW = JobSpec(model=ModelSpec(layers=6, tokens=2048), network=NetworkSpec(busbw_gbps=30.0), end_sync=True, steps=6)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    return analyze(SLOW, tmp_path_factory.mktemp("slow"))


def test_accumulation_where_memory_is_unknown(job: Analyzed) -> None:
    finding = batch_size.evaluate(job.context)
    assert finding is not None
    assert finding.rule in job.rules
    assert finding.severity is Severity.INFO
    assert finding.obtained is Obtained.REPLAYED
    assert not finding.whatif, "another training is no part of a joint plan"
    assert finding.predicted_step_us is not None
    assert finding.predicted_step_us.mid < 0.9 * job.context.step_time_us
    assert (finding.action.setting, finding.action.old, finding.action.new) == (
        "batches accumulated per optimizer step", "1", "2",
    )  # fmt: skip
    assert "no_sync()" in finding.action.how
    assert "learning rate" in (finding.action.costs or "")


def test_the_reason_is_told_where_reductions_take_as_long(job: Analyzed) -> None:
    finding = batch_size.evaluate(job.context)
    assert finding is not None
    assert finding.title.endswith("less time (fewer reductions)")
    rows = tuple(dataclasses.replace(row, exposed_comm_transfer_us=0.1 * job.context.step_time_us + 1)
                 for row in job.context.summary.time_breakdown)  # fmt: skip
    finding = batch_size.evaluate(changed(job.context, time_breakdown=rows))
    assert finding is not None
    assert finding.title.endswith("less time"), "most of it is something else that is done once per step"


def test_a_larger_batch_where_memory_is_free(job: Analyzed) -> None:
    loader = DataLoaderMetadata(batch_size=32)
    runs = {rank: RunMetadata(rank=rank, dataloaders=(loader,)) for rank in job.context.ranks}
    memory = tuple(
        MemoryRow(rank=rank, peak_bytes=20 * GIB, capacity_bytes=80 * GIB, headroom_bytes=60 * GIB)
        for rank in job.context.ranks
    )
    finding = batch_size.evaluate(changed(job.context, runs=runs, memory=memory))
    assert finding is not None
    assert (finding.action.setting, finding.action.old, finding.action.new) == ("batch size per rank", "32", "64")
    assert "DataLoader(dataset, batch_size=64" in finding.action.how
    full = tuple(dataclasses.replace(row, headroom_bytes=30 * GIB) for row in memory)
    finding = batch_size.evaluate(changed(job.context, runs=runs, memory=full))
    assert finding is not None
    assert finding.action.setting == "batches accumulated per optimizer step"


def test_silent_where_communication_hides(tmp_path_factory: pytest.TempPathFactory) -> None:
    quick = dataclasses.replace(SLOW, network=NetworkSpec(busbw_gbps=150.0), model=ModelSpec(layers=6, tokens=8192))
    assert batch_size.RULE not in analyze(quick, tmp_path_factory.mktemp("quick")).rules


def test_where_ddp_does_not_show_a_loop_reduces_after_the_last_batch(job: Analyzed) -> None:
    finding = batch_size.evaluate(changed(job.context, strategy="data"))
    assert finding is not None
    assert "a loop of your own reduces after the last batch only" in finding.action.how
    recorded = {rank: RunMetadata(rank=rank) for rank in job.context.ranks}
    assert batch_size.evaluate(changed(job.context, strategy="data", runs=recorded)) is None
