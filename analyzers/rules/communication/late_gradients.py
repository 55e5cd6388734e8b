"""Gradients that wait for the backward: fires when few large all-reduces follow it, and no compute overlaps them.

DistributedDataParallel reduces each bucket as soon as its gradients are there (Li et al., VLDB 2020). In traces of
other tools all-reduces alone do not show whether it is at work, so what to change is said for both: by hand, or held
back. ``sharded_overlap`` is about ZeRO, ``gradients_by_hand`` about loops over single gradients, ``ddp_buckets`` about
one bucket of a DDP that shows.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.communication.ddp_arguments import written
from perfscope.analyzers.rules.communication.gradients_by_hand import LET_DDP, OVERLAPPED
from perfscope.analyzers.rules.communication.reductions import GradientReductions, reductions
from perfscope.analyzers.rules.communication.traffic import sharded_by_unknown
from perfscope.analyzers.rules.context import RuleContext, known
from perfscope.analyzers.whatif.bucketing import DEFAULT_CAP
from perfscope.analyzers.whatif.by_hand import MANY
from perfscope.analyzers.whatif.ddp import BACKWARD_SHARE
from perfscope.results.findings import Action, Confidence, Evidence, Finding

RULE: Final = "late-gradients"
SHARE: Final = 0.05
"""Share of the step that must be saved."""
EXPOSED: Final = 0.2
"""Least share of the step that is exposed transfer: less is usual where nothing overlaps, and why is not recorded."""
LONG_US: Final = 200.0
"""Mean transfer from which it is gradients that are reduced: losses and norms take the latency, 10 to 100 µs."""

_CHANGE: Final = {"gradients.reduce": "ddp"}
_OVERLAP: Final = (
    "Reduce gradients while the backward goes on: by DistributedDataParallel, in smaller buckets (bucket_cap_mb) where "
    "it is at work already."
)
_HELD: Final = (
    "DistributedDataParallel reduces a bucket as soon as its gradients are there. What holds all of them back: a "
    "communication hook that waits; torch.compile with torch._dynamo.config.optimize_ddp = False, whose backward hands "
    "over all gradients at its end; CUDA_DEVICE_MAX_CONNECTIONS=1; a bucket_cap_mb that all gradients fit."
)


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: communication is overlapped, its wrapper is recorded, or little would be saved."""
    # Without the other ranks a wait for them looks like a transfer.
    is_open = job.on_devices and not job.runs and not job.info.missing_ranks
    reduced = reductions(job) if is_open and job.hidden_share <= OVERLAPPED else None
    if reduced is None or reduced.transfer_us < LONG_US or _has_own_rule(job, reduced):
        return None
    exposed_us = job.exposed_of_us(reduced.count * reduced.transfer_us)
    if job.share(exposed_us) < EXPOSED:
        return None
    prediction = job.predict(_CHANGE) if job.predict is not None else None
    hidden_us = min(exposed_us, BACKWARD_SHARE * job.typical_us("compute"))
    saved_us = hidden_us if prediction is None else job.step_time_us - prediction.mid
    if saved_us < SHARE * job.step_time_us:
        return None
    return job.finding(
        RULE,
        f"Gradients are all-reduced after the backward, where no compute overlaps that: {job.share(exposed_us):.0%} of "
        f"the step is exposed transfer",
        saved_us,
        evidence=(
            Evidence("all-reduces per step", reduced.count, ranks=reduced.ranks),
            *known("gradient bytes per step", reduced.bytes, "bytes", reduced.ranks),
            job.exposed_transfer(),
            Evidence("overlapped share of the communication, or of less compute", job.hidden_share, "share"),
        ),
        action=Action(
            setting="gradient all-reduce", old="after the backward", new="during the backward", how=_how(job, reduced),
            costs="DDP keeps a copy of the gradients in its buckets, unless gradient_as_bucket_view=True.",
        ),
        confidence=job.confidence() if prediction is not None else Confidence.LOW,
        predicted=prediction,
        whatif=None if prediction is None else _CHANGE,
    )  # fmt: skip


def _has_own_rule(job: RuleContext, reduced: GradientReductions) -> bool:
    """Does another rule know better, or reduces another wrapper the gradients?"""
    if job.torch_ddp:
        return reduced.count <= 1
    return reduced.count >= MANY or not job.reduced_by_unknown or sharded_by_unknown(job)


def _how(job: RuleContext, reduced: GradientReductions) -> str:
    """What to do about DDP, where it is at work; else about both ways."""
    if job.torch_ddp:
        return _HELD
    if reduced.count > 1:
        where_at_work = f"Where it is at work already: {_HELD}"
    else:
        smaller = written(job.framework, bucket_cap_mb=round(DEFAULT_CAP))
        where_at_work = f"Where it is at work already, all gradients are in one bucket:\n{smaller}"
    return f"{_OVERLAP}\nWhere a loop reduces gradients: {LET_DDP}\n{where_at_work}"
