"""Optimizers of many small kernels: what each kernel takes however little it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import perfscope
from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.host import launch_bound, optimizer_kernels
from perfscope.results.findings import Prediction
from perfscope.results.tables import ModuleRow
from tests.analyzers.rules.jobs import STEP_US, breakdown, context, kernel, runs
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import Job, Model, Recording


def by_hand(count: float, *, name: str = "Optimizer.step#AdamW.step", **others: Any) -> RuleContext:
    """1,000 kernels per step, of which the optimizer has ``count``; the shortest takes 4 µs, 1 µs lies between two."""
    module = ModuleRow(
        name=name, depth=0, count_per_step=1.0, host_us_per_step=1.0, device_us_per_step=1.0, kernels_per_step=count
    )
    rows = (
        kernel("gemm", 5e4, count_per_step=400.0, min_us=90.0),
        kernel("mul", 9e3, count_per_step=600.0, min_us=4.0),
    )
    return context(breakdown(0, idle_dependency=1_000.0), modules=(module,), kernels=rows, **others)


def test_each_kernel_takes_what_the_shortest_does_and_the_time_to_the_next() -> None:
    finding = optimizer_kernels.evaluate(by_hand(2_000.0))
    assert finding is not None
    assert finding.ceiling == pytest.approx(STEP_US / (STEP_US - 2_000 * (4 + 1)) - 1)
    assert (finding.action.setting, finding.action.new) == ("torch.optim.AdamW(fused=…)", "True")
    assert "2,000 kernels per step: at least 10% of the step" in finding.title


@pytest.mark.parametrize(
    "case",
    [
        by_hand(990.0),
        by_hand(2_000.0, name="forward"),
        by_hand(2_000.0, devices=("CPU",)),
    ],
    ids=["few", "not marked", "no device"],
)
def test_is_silent_without_many_kernels_of_an_optimizer_on_a_device(case: RuleContext) -> None:
    assert optimizer_kernels.evaluate(case) is None


def test_one_that_cannot_be_fused_is_told_what_else_helps() -> None:
    finding = optimizer_kernels.evaluate(by_hand(2_000.0, runs=runs(1, optimizer={"classes": ["Lion"]})))
    assert finding is not None
    assert finding.action.new is None
    assert "torch.compile(optimizer.step)" in finding.action.how


@pytest.mark.parametrize(("saved_us", "fires"), [(6_000.0, True), (4_000.0, False)])
def test_few_kernels_count_with_what_launching_them_takes(saved_us: float, fires: bool) -> None:
    """500 kernels take 2.5 % of the step at least; with launches, which the replay knows, more."""
    without = Prediction(low=STEP_US - saved_us, mid=STEP_US - saved_us, high=STEP_US)
    asked: list[Mapping[str, str]] = []
    finding = optimizer_kernels.evaluate(by_hand(500.0, predict=lambda change: asked.append(change) or without))
    assert (finding is not None) == fires
    assert asked[0] == {"optimizer.loops": "0"}
    if finding is not None:
        assert finding.whatif == {"optimizer.loops": "0"}
        assert finding.predicted_step_us == without
        assert "6% of the step" in finding.title


def test_what_few_kernels_bring_is_told_where_it_is_what_devices_wait_for() -> None:
    case = by_hand(2_000.0, predict=lambda _: Prediction(low=8e4, mid=8e4, high=8e4))
    rows = tuple(replace(row, idle_launch_us=20_000.0) for row in case.summary.time_breakdown)
    waiting = replace(case, summary=replace(case.summary, time_breakdown=rows))
    assert launch_bound.evaluate(waiting) is None
    assert optimizer_kernels.evaluate(waiting) is not None


@pytest.mark.parametrize(
    ("loops_ms", "both_ms", "rest_ms"), [(10, 30, 20), (10, 14, None), (16, 30, 14), (26, 30, None)]
)
def test_a_loop_is_named_and_launches_count_for_what_they_cost_beside_it(
    loops_ms: int, both_ms: int, rest_ms: int | None
) -> None:
    """Without any launch the step takes 30 ms less, with few kernels in the optimizer 10 to 26; with both 30 or 14."""

    def predict(change: Mapping[str, str]) -> Prediction:
        loops = "optimizer.loops" in change
        less_ms = both_ms if loops and "host.launch" in change else loops_ms if loops else 30
        return Prediction(low=0, mid=STEP_US - 1e3 * less_ms, high=STEP_US)

    case = by_hand(2_000.0, predict=predict)
    rows = tuple(replace(row, idle_launch_us=20_000.0) for row in case.summary.time_breakdown)
    waiting = replace(case, summary=replace(case.summary, time_breakdown=rows))
    told, of_loops = launch_bound.evaluate(waiting), optimizer_kernels.evaluate(waiting)
    assert of_loops is not None
    assert of_loops.predicted_step_us is not None
    assert of_loops.predicted_step_us.mid == STEP_US - 1e3 * loops_ms
    assert (None if told is None or told.predicted_step_us is None else told.predicted_step_us.mid) == (
        None if rest_ms is None else STEP_US - 1e3 * rest_ms
    )
    assert told is None or told.action.setting == "torch.compile(mode=…)"


def test_the_replay_is_what_an_implementation_with_few_kernels_brings(tmp_path: Path) -> None:
    job = Job(
        seed=1, ranks=1, ranks_per_host=1, foreach=False, optimizer_kernels=10,
        model=Model(blocks=2, tokens=4096, width=1024), recording=Recording(steps=4),
    )  # fmt: skip
    loops = emulate(job)
    loops.write(tmp_path)
    (finding,) = (row for row in perfscope.analyze(tmp_path).findings if row.rule == optimizer_kernels.RULE)
    assert finding.predicted_step_us is not None
    fused_us = step_ns(replace(job, foreach=True)) / 1e3
    assert finding.predicted_step_us.mid == pytest.approx(fused_us, rel=0.02)
