"""Tensors that are filled: fires when writing one value into tensors takes much of the step.

``torch.zeros``, ``ones`` and ``full`` in the loop write all the memory of a new tensor, as do ``zero_()`` and gradients
that are set to zero. A buffer that is made once is written once, and memory that is overwritten anyway, by nothing.
Source: torch.empty; torch.optim.Optimizer.zero_grad (set_to_none); PyTorch tutorial "Performance Tuning Guide".
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code

RULE: Final = "filled-tensors"
SHARE: Final = 0.10
"""Least share of the step that filling takes."""
FILLING: Final = frozenset({"aten::fill_", "aten::zero_"})


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: filling takes little."""
    rows = [row for row in job.summary.operators if row.name in FILLING]
    filling_us = sum(map(job.operator_us, rows))
    if filling_us < SHARE * job.step_time_us:
        return None
    worst = max(rows, key=job.operator_us)
    return job.finding(
        RULE,
        f"Filling tensors with one value takes {job.share(filling_us):.0%} of the step: "
        f"{worst.count_per_step:,.0f} {worst.name} per step",
        filling_us,
        evidence=tuple(
            evidence
            for row in rows
            for evidence in (
                Evidence(f"{row.name} itself, per step", job.operator_us(row), "us", job.ranks),
                Evidence(f"{row.name} per step", row.count_per_step, ranks=job.ranks),
            )
        ),
        action=Action(setting="tensors that are filled", old="in every step", new="once, or not at all", how=_HOW),
        confidence=job.confidence(Confidence.MEDIUM),
    )


_HOW: Final = (
    "Make buffers whose size stays the same once, before the loop, and use torch.empty for what is overwritten anyway: "
    "torch.zeros, ones and full write all of a new tensor's memory.\n"
    + code("python", "buffer = torch.empty(1024)  # instead of torch.zeros(1024)")
    + "\nLeave gradients out that a backward writes anyway:\n"
    + code("python", "optimizer.zero_grad(set_to_none=True)  # the default; not set_to_none=False")
)
