"""``find_unused_parameters``: fires where its walk slows a job that waits for its host."""

from __future__ import annotations

from typing import Any

import pytest

from perfscope.analyzers.rules.communication import unused_parameters
from perfscope.analyzers.rules.context import RuleContext
from perfscope.recording.metadata import DeviceMetadata, RunMetadata
from perfscope.results.tables import OperatorRow
from tests.analyzers.rules.jobs import breakdown, context


def case(walk_us: float, idle_us: float, settings: dict[str, Any] | None = None, **ddp: Any) -> RuleContext:
    """Steps of 100 ms in which the device waits ``idle_us`` for its host."""
    walk = OperatorRow(
        name=unused_parameters.WALK, operator_class="other", count_per_step=1.0, device_us_per_step=0.0,
        host_us_per_step=walk_us, kernels_per_step=0.0, flops_per_step=None, tflops=None,
        share_of_peak=None, dtype=None,
    )  # fmt: skip
    recorded = {"ddp": {"find_unused_parameters": True, "static_graph": False, **ddp}, **(settings or {})}
    runs = {0: RunMetadata(settings=recorded, device=DeviceMetadata(type="cuda"))}
    return context(breakdown(0, idle_launch=idle_us), runs=runs, operators=(walk,))


def test_a_graph_that_does_not_change_is_walked_once() -> None:
    finding = unused_parameters.evaluate(case(6_000.0, 8_000.0))
    assert finding is not None
    assert (finding.action.setting, finding.action.old, finding.action.new) == ("static_graph", "False", "True")
    assert "DistributedDataParallel(model, static_graph=True)" in finding.action.how
    assert finding.ceiling == pytest.approx(100 / 94 - 1)


def test_where_every_parameter_is_used_it_is_for_nothing() -> None:
    finding = unused_parameters.evaluate(case(6_000.0, 8_000.0, unused_parameter_size=0))
    assert finding is not None
    assert (finding.action.setting, finding.action.new) == ("find_unused_parameters", "False")
    transformers = {"transformers": {"ddp_find_unused_parameters": True}}
    finding = unused_parameters.evaluate(case(6_000.0, 8_000.0, transformers, unused_parameter_size=0))
    assert finding is not None
    assert "TrainingArguments(output_dir, ddp_find_unused_parameters=False)" in finding.action.how
    assert "fails or hangs" in (finding.action.costs or "")


def test_no_more_is_lost_than_the_device_waits() -> None:
    finding = unused_parameters.evaluate(case(6_000.0, 2_500.0))
    assert finding is not None
    assert finding.ceiling == pytest.approx(100 / 97.5 - 1)


def test_silent_where_the_device_is_busy_meanwhile_or_the_graph_is_static() -> None:
    assert unused_parameters.evaluate(case(6_000.0, 1_900.0)) is None
    assert unused_parameters.evaluate(case(1_900.0, 8_000.0)) is None
    assert unused_parameters.evaluate(case(6_000.0, 8_000.0, static_graph=True)) is None
