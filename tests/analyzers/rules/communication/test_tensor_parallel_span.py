"""Tensor parallelism across hosts: fires where its collectives are exposed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.rules.communication import tensor_parallel_span
from perfscope.analyzers.rules.context import RuleContext
from perfscope.recording.metadata import RunMetadata
from perfscope.results.findings import Confidence
from perfscope.results.rows import CollectiveRow
from perfscope.results.tables import GroupRow
from tests.analyzers.rules.jobs import analyze, breakdown, context
from tests.generator import JobSpec, ModelSpec, NetworkSpec


def reduced(group: str, busbw_gbps: float) -> CollectiveRow:
    return CollectiveRow(
        group=group, ranks=(0, 1), kind="all_reduce", dtype="bfloat16", bytes=1 << 24, count=80, transfer_us=100.0,
        wait_us=0.0, algbw_gbps=busbw_gbps, busbw_gbps=busbw_gbps, last_arriver={},
    )  # fmt: skip


def case(*, across: bool, exposed_us: float = 30_000.0, per_host: int = 4, **megatron: Any) -> RuleContext:
    """A tensor parallel group of 8 at 20 GB/s that takes 30 of 100 ms; another group reaches 200 inside its host."""
    groups = (
        GroupRow(name="tp", ranks=tuple(range(8)), role="tensor", role_from="", comm_us=30_000.0, across_hosts=across),
        GroupRow(name="dp", ranks=(0, 1), role="data", role_from="", comm_us=1_000.0, across_hosts=False),
    )
    runs = {
        rank: RunMetadata(rank=rank, local_world_size=per_host, settings={"megatron": megatron} if megatron else {})
        for rank in range(8)
    }
    ranks = [breakdown(rank, exposed_comm_transfer=exposed_us) for rank in range(8)]
    return context(*ranks, groups=groups, collectives=(reduced("tp", 20.0), reduced("dp", 200.0)), runs=runs)


def test_names_the_degree_that_stays_inside() -> None:
    finding = tensor_parallel_span.evaluate(case(across=True, tensor_model_parallel_size=8))
    assert finding is not None
    assert (finding.action.old, finding.action.new) == ("8", "4")
    assert "--tensor-model-parallel-size 4" in finding.action.how
    # At 200 instead of 20 GB/s nine tenths of 30 ms are saved.
    assert finding.ceiling == pytest.approx(100 / 73 - 1)
    assert finding.confidence is Confidence.MEDIUM


def test_a_group_that_would_fit_has_its_ranks_in_the_wrong_order() -> None:
    finding = tensor_parallel_span.evaluate(case(across=True, per_host=8))
    assert finding is not None
    assert finding.action.new == "8"
    assert "8 consecutive ranks" in finding.action.how


def test_silent_inside_a_host_and_where_it_costs_little() -> None:
    assert tensor_parallel_span.evaluate(case(across=False)) is None
    assert tensor_parallel_span.evaluate(case(across=True, exposed_us=5_400.0)) is None
    assert tensor_parallel_span.evaluate(case(across=True, exposed_us=5_600.0)) is not None


def test_a_simulated_job(tmp_path: Path) -> None:
    spec = JobSpec(
        ranks=4, tensor=2, model=ModelSpec(layers=4, tokens=8192), steps=5, end_sync=True,
        network=NetworkSpec(busbw_gbps=300.0, between_hosts_gbps=20.0), ranks_per_host=1,
    )  # fmt: skip
    assert tensor_parallel_span.RULE in analyze(spec, tmp_path).rules
