"""An optimizer that computes on the CPU, for devices that wait for it."""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.tables import ModuleRow

STEP_OF: Final = "Optimizer.step#"
_STEPS: Final = (STEP_OF, "perfscope::optimizer")
"""What ranges of an optimizer's step begin with."""


def optimizer_steps(job: RuleContext) -> list[ModuleRow]:
    """The ranges of optimizers' steps, as far as these are marked."""
    return [row for row in job.summary.modules if row.name.startswith(_STEPS)]


def on_cpu_us(job: RuleContext) -> float:
    """For how long an optimizer computes on the CPU in each step, while devices wait: its steps launch nothing. 0 where
    none does, and in a job on CPUs.
    """
    if not job.on_devices:
        return 0.0
    rows = optimizer_steps(job)
    launched = sum(row.kernels_per_step for row in rows)
    idle = sum(job.typical_us(category) for category in ("idle_sync", "idle_launch", "idle_host"))
    return 0.0 if launched else min(max((row.host_us_per_step for row in rows), default=0.0), idle)
