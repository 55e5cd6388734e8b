"""DDP ``broadcast_buffers``: fires when the step is shorter without sending rank 0's buffers before each forward.

DistributedDataParallel does that by default in every forward that trains (torch ``nn/parallel/distributed.py``,
``_sync_buffers``), and nothing overlaps it. Tables that never change (masks, positions) are sent in vain; statistics of
BatchNorm may be each rank's own while training.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.communication.ddp_arguments import setting, written
from perfscope.analyzers.rules.communication.traffic import traffic
from perfscope.analyzers.rules.context import RuleContext, known
from perfscope.results.findings import Action, Finding

RULE: Final = "ddp-broadcast-buffers"
SHARE: Final = 0.05
"""Least share of the step that is saved."""
_CHANGE: Final = {"ddp.broadcast_buffers": "false"}
_CHANGING: Final = (
    "Buffers that change in training (statistics of BatchNorm) are each rank's own then: average them before the model "
    "is saved or evaluated."
)


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no buffers are sent, little would be saved, or the steps cannot be replayed."""
    if not job.torch_ddp or setting(job, "broadcast_buffers") is False:
        return None
    replayed = job.replayed(_CHANGE, SHARE)
    if replayed is None:
        return None
    prediction, saved_us = replayed
    sent = traffic(job, "broadcast")
    return job.finding(
        RULE,
        f"DDP sends rank 0's buffers before each forward, which costs {job.share(saved_us):.0%} of the step",
        saved_us,
        evidence=(
            *known("bytes broadcast per step", None if sent is None else sent.bytes, "bytes"),
            *known("broadcasts per step", None if sent is None else sent.count),
            job.exposed_transfer(),
        ),
        action=Action(
            setting="DistributedDataParallel(broadcast_buffers=…)",
            old="True",
            new="False",
            how=f"{written(job.framework, broadcast_buffers=False)}\n{_CHANGING}",
            costs="Buffers that change in training differ between ranks.",
        ),
        confidence=job.confidence(),
        predicted=prediction,
        whatif=_CHANGE,
    )
