"""Megatron's overlap flags: fires where gradients or parameters move while nothing computes."""

from __future__ import annotations

from typing import Any

import pytest

from perfscope.analyzers.rules.communication import megatron_overlap
from perfscope.analyzers.rules.context import RuleContext
from perfscope.recording.metadata import RunMetadata
from perfscope.results.rows import CollectiveRow
from perfscope.results.tables import GroupRow
from tests.analyzers.rules.jobs import breakdown, context


def case(
    kind: str, transfer_us: float, role: str = "data", exposed_us: float = 20_000.0, **megatron: Any
) -> RuleContext:
    """A step of 100 ms with one collective of a data parallel group."""
    row = CollectiveRow(
        group="dp", ranks=(0, 1), kind=kind, dtype="float32", bytes=1 << 30, count=8, transfer_us=transfer_us,
        wait_us=0.0, algbw_gbps=1.0, busbw_gbps=1.0, last_arriver={},
    )  # fmt: skip
    group = GroupRow(name="dp", ranks=(0, 1), role=role, role_from="", comm_us=transfer_us, across_hosts=False)
    runs = {0: RunMetadata(settings={"megatron": megatron})}
    ranks = [breakdown(rank, exposed_comm_transfer=exposed_us) for rank in (0, 1)]
    return context(*ranks, collectives=(row,), groups=(group,), runs=runs)


def test_reductions_after_the_backward() -> None:
    finding = megatron_overlap.evaluate(case("all_reduce", 15_000.0, overlap_grad_reduce=False))
    assert finding is not None
    assert (finding.action.setting, finding.action.old, finding.action.new) == (
        "--overlap-grad-reduce", "not set", "set",
    )  # fmt: skip
    assert finding.action.how.splitlines()[2] == "--overlap-grad-reduce"
    assert finding.ceiling == pytest.approx(100 / 85 - 1)


def test_gathers_before_the_forward() -> None:
    recorded = {"overlap_grad_reduce": True, "overlap_param_gather": False, "use_distributed_optimizer": True}
    finding = megatron_overlap.evaluate(case("all_gather", 15_000.0, **recorded))
    assert finding is not None
    assert "--overlap-grad-reduce --overlap-param-gather" in finding.action.how.splitlines()
    recorded["use_distributed_optimizer"] = False
    assert megatron_overlap.evaluate(case("all_gather", 15_000.0, **recorded)) is None


def test_silent_where_it_is_set_overlapped_short_or_another_group_s() -> None:
    assert megatron_overlap.evaluate(case("all_reduce", 15_000.0, overlap_grad_reduce=True)) is None
    assert megatron_overlap.evaluate(case("all_reduce", 15_000.0)) is None
    assert (
        megatron_overlap.evaluate(case("all_reduce", 15_000.0, exposed_us=4_900.0, overlap_grad_reduce=False)) is None
    )
    assert megatron_overlap.evaluate(case("all_reduce", 4_900.0, overlap_grad_reduce=False)) is None
    assert megatron_overlap.evaluate(case("all_reduce", 15_000.0, role="tensor", overlap_grad_reduce=False)) is None
