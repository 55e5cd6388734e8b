"""Debugging left on: the switch is named with how to turn it off, and its cost is a ceiling."""

from __future__ import annotations

import pytest

from perfscope.analyzers.rules.host import debug_settings
from perfscope.results.findings import Severity
from tests.analyzers.rules.jobs import breakdown, changed, context, runs


def job(variables: dict[str, str], settings: dict[str, object] | None = None, **rows: float):
    recorded = runs(2, environment=variables, **(settings or {}))
    return context(breakdown(0, **rows), breakdown(1, **rows), runs=recorded)


@pytest.mark.parametrize(
    ("name", "value"),
    [("CUDA_LAUNCH_BLOCKING", "1"), ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"), ("NCCL_DEBUG", "TRACE")],
)
def test_each_variable_is_named(name, value):
    finding = debug_settings.evaluate(job({name: value}, idle_sync=10_000.0, idle_host=2_000.0))
    assert finding is not None
    assert f"{name}={value}" in finding.title
    assert f"unset {name}  # " in finding.action.how
    assert finding.evidence[0].ranks == (0, 1)
    assert finding.ceiling == pytest.approx(100 / 88 - 1)


@pytest.mark.parametrize(
    "variables",
    [{}, {"CUDA_LAUNCH_BLOCKING": "0"}, {"TORCH_DISTRIBUTED_DEBUG": "INFO"}, {"NCCL_DEBUG": "WARN"}],
    ids=str,
)
def test_silent(variables):
    assert debug_settings.evaluate(job(variables, idle_sync=10_000.0)) is None


def test_a_switch_that_reaches_nothing_is_only_mentioned():
    finding = debug_settings.evaluate(job({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}))
    assert finding is not None
    assert (finding.severity, finding.ceiling) == (Severity.INFO, None)


def test_anomaly_detection_in_the_framework_s_words():
    anomaly = {"autograd": {"detect_anomaly": True}}
    finding = debug_settings.evaluate(job({}, anomaly, idle_launch=20_000.0))
    assert finding is not None
    assert "torch.autograd.set_detect_anomaly(False)" in finding.action.how
    lightning = debug_settings.evaluate(job({}, {**anomaly, "lightning": {"precision": "32-true"}}))
    assert lightning is not None
    assert "Trainer(detect_anomaly=False)" in lightning.action.how


def test_on_cpus_operators_take_longer_and_switches_of_devices_cost_nothing():
    anomaly = job({}, {"autograd": {"detect_anomaly": True}}, exposed_comm_wait=10_000.0, idle_host=20_000.0)
    finding = debug_settings.evaluate(changed(anomaly, devices=("CPU",)))
    assert finding is not None
    assert finding.ceiling == pytest.approx(100 / 10 - 1)  # all but communication: 70 ms of operators, 20 of Python
    blocking = debug_settings.evaluate(
        changed(job({"CUDA_LAUNCH_BLOCKING": "1"}, idle_host=20_000.0), devices=("CPU",))
    )
    assert blocking is not None
    assert (blocking.severity, blocking.ceiling) == (Severity.INFO, None)


def test_several_are_one_finding():
    both = {"CUDA_LAUNCH_BLOCKING": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    finding = debug_settings.evaluate(job(both, idle_launch=10_000.0, exposed_comm_wait=10_000.0))
    assert finding is not None
    assert finding.action.how.count("unset ") == 2
    assert finding.ceiling == pytest.approx(100 / 80 - 1)
