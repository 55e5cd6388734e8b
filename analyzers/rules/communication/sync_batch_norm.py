"""Batch normalizations that all ranks compute together (SyncBatchNorm): fires when the step is shorter without that.

Each of them gathers the statistics of all ranks in its forward, and sums two gradients over them in its backward. These
are small, so each takes the latency, and nothing of the model can go on meanwhile. With enough samples on each rank its
own statistics are as good. Source: torch ``nn/modules/_functions.py``, ``SyncBatchNorm``.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Action, Evidence, Finding, code

RULE: Final = "sync-batch-norm"
SHARE: Final = 0.05
"""Least share of the step that is saved."""
_CHANGE: Final = {"batch_norm.sync": "false"}


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: there are none, little would be saved, or the steps cannot be replayed."""
    replayed = job.replayed(_CHANGE, SHARE) if job.of_layers else None
    if replayed is None:
        return None
    prediction, saved_us = replayed
    rows = [row for row in job.summary.collectives if job.is_of_layers(row)]
    count = sum(row.count for row in rows) / job.steps
    transfer_us = sum(row.count * row.transfer_us for row in rows) / job.steps
    return job.finding(
        RULE,
        f"Synchronized batch normalization ({count:.0f} collectives per step, which all layers wait for) costs "
        f"{job.share(saved_us):.0%} of the step",
        saved_us,
        evidence=(
            Evidence("collectives of layers per step", count),
            Evidence("their transfer per step", transfer_us, "us", job.ranks),
            Evidence("step in which each rank has its own statistics, replayed", prediction.mid, "us", job.ranks),
        ),
        action=Action(
            setting="SyncBatchNorm",
            old="in use",
            new="BatchNorm, or GroupNorm",
            how="With some 16 samples per rank or more, leave out convert_sync_batchnorm: each rank then normalizes "
            "by the statistics of its own samples. With fewer, use a normalization that needs no others:\n"
            + code("python", "norm = torch.nn.GroupNorm(32, channels)  # in place of BatchNorm2d(channels)"),
            costs="Another model: compare its accuracy. Running statistics differ between ranks; DDP's "
            "broadcast_buffers sends rank 0's.",
        ),
        confidence=job.confidence(),
        predicted=prediction,
        whatif=_CHANGE,
    )
