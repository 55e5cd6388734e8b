"""DDP ``gradient_as_bucket_view``: fires when copying gradients out of their buckets takes a share of the step, or
device memory is tight and holds every gradient twice.

Without it DDP copies each gradient into its bucket and back, and both stay allocated (torch
``nn/parallel/distributed.py``). The copy back runs in ``copy_bucket_to_grad`` (``reducer.cpp``).
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.communication.ddp_arguments import setting, written
from perfscope.analyzers.rules.context import RuleContext, known
from perfscope.results.findings import Action, Evidence, Finding, Obtained, Severity
from perfscope.text import byte_size

RULE: Final = "ddp-bucket-view"
SHARE: Final = 0.02
"""Least share of the step that the copies take."""
TIGHT: Final = 0.05
"""Memory is tight when less than this share of it is free."""
WORTH: Final = 0.02
"""Least share of the device memory that gradients take."""
COPIES: Final = "torch.distributed.ddp.reducer::copy_bucket_to_grad"


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: the setting is on or not known, copies are short, and memory is not tight."""
    if not job.torch_ddp or setting(job, "gradient_as_bucket_view") is not False:
        return None
    copies_us = _copies_us(job)
    frees = _freed_when_tight(job)
    long = copies_us >= SHARE * job.step_time_us
    if not long and frees is None:
        return None
    what = f"takes {job.share(copies_us):.0%} of the step" if long else f"holds {byte_size(frees or 0)} twice"
    return Finding(
        rule=RULE,
        title=f"DDP copies gradients into buckets and back, which {what}",
        severity=Severity.of_share(job.share(copies_us)) if long else Severity.INFO,
        evidence=(
            Evidence("copying gradients out of buckets, per step", copies_us, "us"),
            *known("gradients held twice", frees, "bytes"),
            *(job.free_memory() if frees is not None else ()),
        ),
        action=Action(
            setting="DistributedDataParallel(gradient_as_bucket_view=…)",
            old="False",
            new="True",
            how=written(job.framework, gradient_as_bucket_view=True),
            costs="No time, and it frees memory. detach_() on gradients no longer works.",
        ),
        confidence=job.confidence(),
        obtained=Obtained.BOUNDED,
        ceiling=job.ceiling(copies_us) if long else None,
    )


def _copies_us(job: RuleContext) -> float:
    """Per rank and step: on the device, or on the host where there is none."""
    rows = [row for row in job.summary.operators if row.name == COPIES]
    return sum(map(job.operator_us, rows))


def _freed_when_tight(job: RuleContext) -> float | None:
    """Bytes that the setting frees where memory is tight; None elsewhere."""
    room = job.free_bytes
    capacity = min((row.capacity_bytes for row in job.summary.memory if row.capacity_bytes), default=None)
    gradients = setting(job, "total_parameter_size_bytes")
    if room is None or capacity is None or not isinstance(gradients, int | float):
        return None
    return float(gradients) if room < TIGHT * capacity and gradients >= WORTH * capacity else None
