"""An optimizer that computes on the CPU, for devices that wait for it."""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.tables import ModuleRow

STEP_OF: Final = "Optimizer.step#"
_STEPS: Final = (STEP_OF, "perfscope::optimizer")
"""What ranges of an optimizer's step begin with."""
_ON_CPU: Final = "CPU"
"""In names of optimizers for the CPU, which may start copies (DeepSpeedCPUAdam, DeepSpeedCPUAdagrad)."""
_ONE_LAUNCH: Final = 0.5
"""Kernels per step from which an optimizer launches some: what is launched right behind its range may count to it."""


def optimizer_steps(job: RuleContext) -> list[ModuleRow]:
    """The ranges of optimizers' steps, as far as these are marked."""
    return [row for row in job.summary.modules if row.name.startswith(_STEPS)]


def is_for_cpu(job: RuleContext) -> bool:
    """Is an optimizer in use that is made for the CPU, by its name?"""
    return any(_ON_CPU in row.name for row in optimizer_steps(job))


def on_cpu_us(job: RuleContext) -> float:
    """For how long an optimizer computes on the CPU in each step, while devices wait: its steps launch nothing, or its
    name tells. 0 where none does, and in a job on CPUs.
    """
    if not job.on_devices:
        return 0.0
    rows = optimizer_steps(job)
    launched = not is_for_cpu(job) and sum(row.kernels_per_step for row in rows) >= _ONE_LAUNCH
    idle = sum(job.typical_us(category) for category in ("idle_sync", "idle_launch", "idle_host"))
    return 0.0 if launched else min(max((row.host_us_per_step for row in rows), default=0.0), idle)
