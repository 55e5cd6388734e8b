"""``find_unused_parameters``: fires where its walk slows a job that waits for its host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from perfscope.analyzers.rank.host_activity import SEARCH
from perfscope.analyzers.rules.communication import unused_parameters
from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.host import launch_bound
from perfscope.recording.metadata import DeviceMetadata, RunMetadata
from perfscope.results.findings import Prediction
from perfscope.results.tables import OperatorRow
from tests.analyzers.rules.jobs import breakdown, changed, context, kernel


def case(
    walk_us: float, idle_us: float, settings: dict[str, Any] | None = None, sync_us: float = 0.0, **ddp: Any
) -> RuleContext:
    """Steps of 100 ms in which the device waits ``idle_us`` for its host, and ``sync_us`` behind synchronizations."""
    walk = OperatorRow(
        name=SEARCH, operator_class="other", count_per_step=1.0, device_us_per_step=0.0,
        host_us_per_step=walk_us, kernels_per_step=0.0, flops_per_step=None, tflops=None,
        share_of_peak=None, dtype=None,
    )  # fmt: skip
    recorded = {"ddp": {"find_unused_parameters": True, "static_graph": False, **ddp}, **(settings or {})}
    runs = {0: RunMetadata(settings=recorded, device=DeviceMetadata(type="cuda"))}
    return context(breakdown(0, idle_launch=idle_us, idle_sync=sync_us), runs=runs, operators=(walk,))


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


def test_a_device_that_waits_for_the_search_behind_a_synchronization_waits_for_it_as_well() -> None:
    finding = unused_parameters.evaluate(case(6_000.0, 2_500.0, sync_us=3_000.0))
    assert finding is not None
    assert finding.ceiling == pytest.approx(100 / 94.5 - 1)


@pytest.mark.parametrize(("walk_us", "launch_bound_too"), [(29_000.0, False), (3_000.0, True)])
def test_graphs_are_no_remedy_for_a_search_that_is_most_of_what_launches_cost(
    walk_us: float, launch_bound_too: bool
) -> None:
    """Without any launch or operator of the host the step takes 30 ms less."""
    kernels = (kernel("small", 9_000.0, count_per_step=900.0),)
    searched = changed(case(walk_us, 35_000.0), kernels=kernels)

    def predict(change: Mapping[str, str]) -> Prediction:
        left = 100_000.0 - 30_000.0 * ("host.launch" in change) - walk_us * ("ddp.find_unused_parameters" in change)
        return Prediction(low=left - 10_000.0, mid=left, high=left + 10_000.0)

    replayed = dataclasses.replace(searched, predict=predict)
    assert (launch_bound.evaluate(replayed) is not None) is launch_bound_too
    assert unused_parameters.evaluate(replayed) is not None
