"""Double precision: fires where matrix products compute in float64, mostly because an array of NumPy brought it in.

NumPy's floating-point arrays are float64, and what torch makes of them is as well; a model is then made float64 to fit.
In float32 everything moves half the bytes, and processors compute twice as much of it at once; devices whose float64 is
slower than that gain more of their products. The bound is half of the computation and of the exposed transfers, and on
devices all of the products. Source: torch.from_numpy; torch.nn.Module.float.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rank.kernel_classes import PRODUCTS
from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code

RULE: Final = "double-precision"
SHARE: Final = 0.05
"""Least share of the step that float64 products take."""
_MOSTLY: Final = 0.8
"""Part of the products' time from which a model computes in float64, and not a part of it that needs to."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: products compute in something else, or take little."""
    products = [row for row in job.summary.operators if row.operator_class in PRODUCTS]
    times = {row: job.operator_us(row) for row in products}
    double_us = sum(us for row, us in times.items() if row.dtype == "float64")
    if double_us < SHARE * job.step_time_us or double_us < _MOSTLY * sum(times.values()):
        return None
    half_us = (job.typical_us("compute") + job.exposed_transfer_us) / 2
    return job.finding(
        RULE,
        f"Matrix products in float64 take {job.share(double_us):.0%} of the step: float32 moves half the bytes",
        max(half_us, double_us) if job.on_devices else half_us,
        evidence=(
            Evidence("matrix products in float64, per step", double_us, "us", job.ranks),
            Evidence("computation, per step (median)", job.typical_us("compute"), "us", job.ranks),
            job.exposed_transfer(),
        ),
        action=Action(setting="precision", old="float64", new="float32", how=_HOW, costs="Numerics: watch the loss."),
        confidence=job.confidence(Confidence.MEDIUM),
    )


_HOW: Final = (
    "Unless the model needs double precision, compute in float32: the model, and batches that come from NumPy, whose "
    "numbers are float64:\n" + code("python", "model = model.float()\nimages = images.float()")
)
