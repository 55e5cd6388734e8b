"""FSDP's gathers: fires where layers wait for what could have been under way, or units have the wrong size."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from perfscope.analyzers.rules import fsdp_prefetch
from perfscope.findings import Obtained
from perfscope.summary import CollectiveRow, CostRow
from tests.analyzers.rules.jobs import Analyzed, account, analyze, facts
from tests.analyzers.whatif.fsdp_variants import gathers_late
from tests.generator import JobSpec, ModelSpec, NetworkSpec

MIB = 1 << 20
SPEC = JobSpec(
    strategy="fsdp",
    model=ModelSpec(layers=8, tokens=4096),
    network=NetworkSpec(busbw_gbps=60.0),
    end_sync=True,
    steps=6,
)


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    with pytest.MonkeyPatch.context() as patch:
        gathers_late(patch)
        return analyze(SPEC, tmp_path_factory.mktemp("late"))


def test_fsdp1_is_told_what_is_still_off(late: Analyzed) -> None:
    told = {"version": 1, "backward_prefetch": "BACKWARD_POST", "forward_prefetch": False}
    finding = fsdp_prefetch.evaluate(late.told(fsdp=told))
    assert finding is not None
    assert (finding.action.setting, finding.action.old, finding.action.new) == (
        "backward_prefetch", "BACKWARD_POST", "BACKWARD_PRE",
    )  # fmt: skip
    assert "backward_prefetch=BackwardPrefetch.BACKWARD_PRE" in finding.action.how
    assert finding.obtained is Obtained.REPLAYED
    assert finding.whatif == {"fsdp.prefetch": "1"}
    finding = fsdp_prefetch.evaluate(late.told(fsdp={**told, "backward_prefetch": "BACKWARD_PRE"}))
    assert finding is not None
    assert "forward_prefetch=True" in finding.action.how


def test_fsdp2_and_accelerate_are_told_in_their_words(late: Analyzed) -> None:
    finding = fsdp_prefetch.evaluate(late.told(fsdp={"version": 2}))
    assert finding is not None
    assert "set_modules_to_forward_prefetch([following])" in finding.action.how
    told = late.told(fsdp={"version": 1}, accelerate={"distributed_type": "FSDP"})
    finding = fsdp_prefetch.evaluate(told)
    assert finding is not None
    assert "fsdp_backward_prefetch: BACKWARD_PRE" in finding.action.how


def test_on_cpus_threads_that_gather_take_the_cores(late: Analyzed) -> None:
    assert fsdp_prefetch.evaluate(late.facts) is not None
    assert fsdp_prefetch.evaluate(dataclasses.replace(late.facts, devices=("CPU",))) is None


def test_silent_where_gathers_hide_already(tmp_path_factory: pytest.TempPathFactory) -> None:
    job = analyze(SPEC, tmp_path_factory.mktemp("ahead"))
    assert fsdp_prefetch.RULE not in job.rules


def gathering(sizes: dict[int, int], transfer_us: float, alpha_us: float = 20.0) -> Any:
    """A step of 100 ms with 20 ms of exposed transfer; ``sizes``: bytes -> gathers a step."""
    rows = tuple(
        CollectiveRow(
            group="0", ranks=(0, 1), kind="all_gather", dtype="bfloat16", bytes=size, count=8 * count,
            transfer_us=transfer_us, wait_us=0.0, algbw_gbps=1.0, busbw_gbps=1.0, last_arriver={},
        )
        for size, count in sizes.items()
    )  # fmt: skip
    cost = CostRow(group="0", kind="all_gather", alpha_us=alpha_us, busbw_gbps=10.0, residual=0.0)
    ranks = [account(rank, exposed_comm_transfer=20_000.0) for rank in (0, 1)]
    return facts(*ranks, collectives=rows, cost_model=(cost,), strategies=("fsdp",))


def test_one_huge_unit_is_to_be_divided() -> None:
    finding = fsdp_prefetch.evaluate(gathering({400 * MIB: 2}, 9_000.0))
    assert finding is not None
    assert "one gather brings 100% of the parameters" in finding.title
    assert "each transformer block" in finding.action.how
    assert fsdp_prefetch.evaluate(gathering({40 * MIB: 20}, 900.0)) is None


def test_many_tiny_units_are_to_be_joined() -> None:
    finding = fsdp_prefetch.evaluate(gathering({MIB: 200}, 100.0, alpha_us=80.0))
    assert finding is not None
    assert "200 gathers of 1.0 MiB" in finding.title
    assert "units twice as large" in finding.action.how
    assert fsdp_prefetch.evaluate(gathering({MIB: 200}, 100.0, alpha_us=40.0)) is None


def test_only_fsdp_has_units() -> None:
    case = gathering({400 * MIB: 2}, 9_000.0)
    assert fsdp_prefetch.evaluate(dataclasses.replace(case, strategies=("zero3",))) is None
