"""Tensor parallelism inside a host: fires when a tensor parallel group spans hosts and its collectives are exposed.

Tensor parallel all-reduces come several times per layer and cannot overlap compute; between hosts they take many
times as long as over NVLink, so tensor parallelism should end at the host and pipelines go across (Narayanan et al.,
SC'21, section 3.2). The saving is bounded by their transfer at the bandwidth of a group that stays on one host, where
there is one.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.context import RuleContext, known
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code
from perfscope.results.tables import GroupRow

RULE: Final = "tensor-parallel-span"
SHARE: Final = 0.05
"""Share of the step that must be recoverable at most."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no tensor parallel group across hosts, or one that costs little."""
    spanning = [row for row in job.summary.groups if row.role == "tensor" and row.across_hosts]
    if not spanning or job.steps == 0:
        return None
    worst = max(spanning, key=lambda row: row.comm_us)
    exposed_us = job.exposed_transfer_us
    now, inside = _busbw(job, worst, across=True), _busbw(job, worst, across=False)
    quicker = min(now / inside, 1.0) if now and inside else 0.0
    bound_us = min(worst.comm_us, exposed_us) * (1 - quicker)
    if bound_us < SHARE * job.step_time_us:
        return None
    size, here = len(worst.ranks), min((run.local_world_size for run in job.runs.values()), default=None)
    return job.finding(
        RULE,
        f"Tensor parallel group {worst.name} of {size} ranks spans hosts: its collectives take "
        f"{job.share(worst.comm_us):.0%} of the step",
        bound_us,
        evidence=(
            Evidence("its collectives per step", worst.comm_us, "us", worst.ranks),
            Evidence("exposed transfer per step (median)", exposed_us, "us"),
            *known("its bus bandwidth", now, "GB/s", worst.ranks),
            *known("bus bandwidth inside a host", inside, "GB/s"),
        ),
        action=Action(
            setting="tensor parallel degree",
            old=str(size),
            new=None if here is None else str(min(size, here)),
            how=_how(job, size, here),
            costs="With a smaller degree each rank holds more of every layer, unless there are more pipeline stages.",
        ),
        confidence=job.confidence(Confidence.MEDIUM if now and inside else Confidence.LOW),
    )


def _busbw(job: RuleContext, like: GroupRow, *, across: bool) -> float | None:
    """Best bus bandwidth, GB/s, of groups that span hosts as this one does, or of those that do not."""
    names = {
        row.name for row in job.summary.groups if row.across_hosts is across and (not across or row.name == like.name)
    }
    rates = [row.busbw_gbps for row in job.summary.collectives if row.group in names and row.busbw_gbps]
    return max(rates, default=None)


def _how(job: RuleContext, size: int, here: int | None) -> str:
    if here is not None and size <= here:
        # It fits, but its ranks are not neighbours.
        return (
            f"Give each host's {here} consecutive ranks to one group: tensor parallelism must be the innermost "
            'dimension of the mesh, init_device_mesh(…, mesh_dim_names=(…, "tp")); Megatron: "tp" first.'
        )
    degree = "as many ranks as a host has" if here is None else str(here)
    if job.framework == "megatron" or job.settings("megatron"):
        if here is None:
            return f"--tensor-model-parallel-size: {degree}; and --pipeline-model-parallel-size larger by as much."
        typed = code("shell", f"--tensor-model-parallel-size {here}")
        return f"{typed}\nAnd --pipeline-model-parallel-size larger by as much."
    return f"A tensor dimension of {degree} in init_device_mesh(…), and pipeline stages or FSDP across hosts."
