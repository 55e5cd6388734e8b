"""Optimizers of many small kernels: what each kernel takes however little it computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import perfscope
from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.host import optimizer_kernels
from perfscope.results.tables import ModuleRow
from tests.analyzers.rules.jobs import STEP_US, breakdown, context, kernel, runs
from tests.emulator.emulate import emulate
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


def test_the_bound_is_what_an_implementation_with_few_kernels_brings(tmp_path: Path) -> None:
    job = Job(
        seed=1, ranks=1, ranks_per_host=1, foreach=False, optimizer_kernels=10,
        model=Model(blocks=2, tokens=4096, width=1024), recording=Recording(steps=4),
    )  # fmt: skip
    loops = emulate(job)
    loops.write(tmp_path)
    (finding,) = (row for row in perfscope.analyze(tmp_path).findings if row.rule == optimizer_kernels.RULE)
    bound_ns = loops.step_ns * (1 - 1 / (1 + (finding.ceiling or 0)))
    assert bound_ns == pytest.approx(loops.step_ns - emulate(replace(job, foreach=True)).step_ns, rel=0.15)
