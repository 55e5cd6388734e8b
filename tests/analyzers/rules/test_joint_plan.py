"""The plan: changes replayed together from the best on, without those that do not go with it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from perfscope.analyzers.rules import joint_plan
from perfscope.results.findings import Action, Confidence, Evidence, Finding, Obtained, Prediction, Severity

SAVES_MS = {"zero.stage": 40, "fsdp.prefetch": 30, "rank.2": 20, "network.latency": -5}


def finding(name: str, value: str) -> Finding:
    return Finding(
        rule=name, title=name, severity=Severity.HIGH, evidence=(Evidence("x", 1.0),),
        action=Action(setting=name, old=None, new=value, how=""), confidence=Confidence.HIGH,
        obtained=Obtained.REPLAYED, ceiling=1.0, whatif={name: value},
    )  # fmt: skip


def predict(change: Mapping[str, str]) -> Prediction | None:
    """Stage 2 and prefetching cannot be replayed together: with stage 2 nothing is left to prefetch."""
    if {"zero.stage", "fsdp.prefetch"} <= set(change):
        return None
    mid = (100 - sum(SAVES_MS[name] for name in change)) * 1e3
    return Prediction(low=mid, mid=mid, high=mid)


def test_what_does_not_go_with_the_best_is_left_out() -> None:
    plan = joint_plan((finding("zero.stage", "2"), finding("fsdp.prefetch", "1"), finding("rank.2", "peers")), predict)
    assert plan is not None
    assert plan.whatif == {"zero.stage": "2", "rank.2": "peers"}
    assert plan.predicted_step_us.mid == pytest.approx(40e3)


def test_what_makes_it_worse_is_left_out() -> None:
    plan = joint_plan(
        (finding("fsdp.prefetch", "1"), finding("rank.2", "peers"), finding("network.latency", "2x")), predict
    )
    assert plan is not None
    assert plan.whatif == {"fsdp.prefetch": "1", "rank.2": "peers"}


def test_one_change_is_no_plan() -> None:
    assert joint_plan((finding("zero.stage", "2"),), predict) is None
    assert joint_plan((finding("zero.stage", "2"), finding("fsdp.prefetch", "1")), predict) is None
