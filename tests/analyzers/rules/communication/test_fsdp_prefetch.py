"""FSDP's gathers: fires where layers wait for what could have been under way, or units have the wrong size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from perfscope.analyzers.rules.communication import fsdp_prefetch
from perfscope.results.findings import Obtained, Prediction
from perfscope.results.rows import CollectiveRow, CostRow
from tests.analyzers.rules.jobs import MIB, STEP_US, Analyzed, analyze, breakdown, changed, context, runs
from tests.analyzers.whatif.fsdp_variants import gathers_late
from tests.generator import JobSpec, ModelSpec, NetworkSpec

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


def test_fsdp1_is_advised_what_is_still_off(late: Analyzed) -> None:
    recorded = {"version": 1, "backward_prefetch": "BACKWARD_POST", "forward_prefetch": False}
    finding = fsdp_prefetch.evaluate(late.with_settings(fsdp=recorded))
    assert finding is not None
    assert (finding.action.setting, finding.action.old, finding.action.new) == (
        "backward_prefetch, forward_prefetch", "BACKWARD_POST, False", "BACKWARD_PRE, True",
    )  # fmt: skip
    assert "backward_prefetch=BackwardPrefetch.BACKWARD_PRE" in finding.action.how
    assert finding.obtained is Obtained.REPLAYED
    assert finding.whatif == {"fsdp.prefetch": "1"}
    finding = fsdp_prefetch.evaluate(late.with_settings(fsdp={**recorded, "backward_prefetch": "BACKWARD_PRE"}))
    assert finding is not None
    assert finding.action.setting == "forward_prefetch"
    assert "forward_prefetch=True" in finding.action.how


@pytest.mark.parametrize(
    ("version", "setting"),
    [(1, "backward_prefetch"), (2, "FSDPModule.set_modules_to_backward_prefetch")],
)
@pytest.mark.parametrize(("forward_saves_us", "alone"), [(1_000.0, True), (3_000.0, False)])
def test_the_backward_alone_is_advised_where_the_forward_gains_little(
    version: int, setting: str, forward_saves_us: float, alone: bool
) -> None:
    """Gathering ahead in the backward saves 10 ms of 100; in the forward, too, 1 or 3 more."""

    def predict(change: Mapping[str, str]) -> Prediction:
        step_us = STEP_US - 10_000.0 - forward_saves_us * ("fsdp.prefetch" in change)
        return Prediction(low=step_us, mid=step_us, high=step_us)

    case = changed(gathering({40 * MIB: 20}, 900.0), predict=predict, runs=runs(2, fsdp={"version": version}))
    finding = fsdp_prefetch.evaluate(case)
    assert finding is not None
    assert (finding.whatif == {"fsdp.backward_prefetch": "BACKWARD_PRE"}) is alone
    assert finding.action.setting.startswith(setting) is (alone or version == 1)
    assert ("forward_prefetch" in finding.action.how) is not alone


def test_fsdp2_and_accelerate_are_advised_in_their_words(late: Analyzed) -> None:
    finding = fsdp_prefetch.evaluate(late.with_settings(fsdp={"version": 2}))
    assert finding is not None
    assert "set_modules_to_forward_prefetch([following])" in finding.action.how
    recorded = late.with_settings(fsdp={"version": 1}, accelerate={"distributed_type": "FSDP"})
    finding = fsdp_prefetch.evaluate(recorded)
    assert finding is not None
    assert "fsdp_backward_prefetch: BACKWARD_PRE" in finding.action.how


def test_without_sizes_it_is_replayed_as_well(late: Analyzed) -> None:
    rows = tuple(replace(row, bytes=None) for row in late.summary.collectives)
    finding = fsdp_prefetch.evaluate(changed(late.context, collectives=rows))
    assert finding is not None
    assert finding.obtained is Obtained.REPLAYED
    assert finding.action.costs == "Memory for the parameters of one more unit."


def test_on_cpus_threads_that_gather_take_the_cores(late: Analyzed) -> None:
    assert fsdp_prefetch.evaluate(late.context) is not None
    assert fsdp_prefetch.evaluate(changed(late.context, devices=("CPU",))) is None


def test_silent_where_gathers_hide_already(tmp_path_factory: pytest.TempPathFactory) -> None:
    job = analyze(SPEC, tmp_path_factory.mktemp("ahead"))
    assert fsdp_prefetch.RULE not in job.rules


def gathering(sizes: dict[int, int], transfer_us: float, alpha_us: float = 20.0) -> Any:
    """A step of 100 ms with 20 ms of exposed transfer; ``sizes``: bytes -> gathers per step."""
    rows = tuple(
        CollectiveRow(
            group="0", ranks=(0, 1), kind="all_gather", dtype="bfloat16", bytes=size, count=8 * count,
            transfer_us=transfer_us, wait_us=0.0, algbw_gbps=1.0, busbw_gbps=1.0, last_arriver={},
        )
        for size, count in sizes.items()
    )  # fmt: skip
    cost = CostRow(group="0", kind="all_gather", alpha_us=alpha_us, busbw_gbps=10.0, residual=0.0)
    ranks = [breakdown(rank, exposed_comm_transfer=20_000.0) for rank in (0, 1)]
    return context(*ranks, collectives=rows, cost_model=(cost,), strategy="fsdp")


def test_a_unit_that_stays_for_the_backward_is_gathered_once() -> None:
    """Of three equal units two are gathered twice: each is a third of the parameters."""
    assert fsdp_prefetch.evaluate(gathering({40 * MIB: 5}, 3_600.0)) is None
    finding = fsdp_prefetch.evaluate(gathering({40 * MIB: 3}, 6_000.0))  # of two equal units each is a half
    assert finding is not None
    assert "one gather holds 50% of the parameters" in finding.title


def test_one_huge_unit_is_to_be_divided() -> None:
    finding = fsdp_prefetch.evaluate(gathering({400 * MIB: 2}, 9_000.0))
    assert finding is not None
    assert "one gather holds 100% of the parameters" in finding.title
    assert "Each transformer block" in finding.action.how
    assert fsdp_prefetch.evaluate(gathering({40 * MIB: 20}, 900.0)) is None


@pytest.mark.parametrize(("settings", "share"), [({}, 100), ({"fsdp.reshard_after_forward": "false"}, 50)])
def test_what_one_unit_holds_is_of_what_a_pass_gathers(settings: dict[str, str], share: int) -> None:
    """200 of 400 MiB that are gathered once, where no gathers of backwards can be replayed away; else twice."""

    def predict(change: Mapping[str, str]) -> Prediction | None:
        return Prediction(low=STEP_US, mid=STEP_US, high=STEP_US) if change != settings else None

    finding = fsdp_prefetch.evaluate(changed(gathering({200 * MIB: 2}, 4_500.0), predict=predict))
    assert finding is not None
    assert f"one gather holds {share}% of the parameters" in finding.title


def test_many_tiny_units_are_to_be_joined() -> None:
    finding = fsdp_prefetch.evaluate(gathering({MIB: 200}, 100.0, alpha_us=80.0))
    assert finding is not None
    assert "200 gathers of 1.00 MiB" in finding.title
    assert "whole blocks without the layers inside them" in finding.action.how
    assert finding.ceiling == pytest.approx(0.25)  # without the 20 ms of exposed transfer the step takes 80
    assert fsdp_prefetch.evaluate(gathering({MIB: 200}, 100.0, alpha_us=40.0)) is None


def test_only_fsdp_has_units() -> None:
    case = gathering({400 * MIB: 2}, 9_000.0)
    assert fsdp_prefetch.evaluate(changed(case, strategy="zero3")) is None
