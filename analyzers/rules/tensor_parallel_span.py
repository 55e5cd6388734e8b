"""Tensor parallelism inside a host: fires when a tensor parallel group spans hosts and its collectives are exposed.

Tensor parallel all-reduces come several times a layer and cannot hide; between hosts they take many times as long as
over NVLink, so tensor parallelism should end at the host and pipelines go across (Narayanan et al., SC'21, section
3.2). What is saved is bounded by their transfer at the rate of a group that stays on one host, where there is one.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.frameworks import framework, settings_of
from perfscope.analyzers.rules.traffic import sure
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling
from perfscope.summary_tables import GroupRow

RULE: Final = "tensor-parallel-span"
SHARE: Final = 0.05
"""Share of the step that must be recoverable at most."""


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: no tensor parallel group across hosts, or one that costs little."""
    spanning = [row for row in facts.groups if row.role == "tensor" and row.across_hosts]
    if not spanning or facts.steps == 0:
        return None
    worst = max(spanning, key=lambda row: row.comm_us)
    exposed_us = facts.typical_us("exposed_comm_transfer")
    now, inside = _busbw(facts, worst, across=True), _busbw(facts, worst, across=False)
    quicker = min(now / inside, 1.0) if now and inside else 0.0
    bound_us = min(worst.comm_us, exposed_us) * (1 - quicker)
    if bound_us < SHARE * facts.step_time_us:
        return None
    size, here = len(worst.ranks), _ranks_on_host(facts)
    return Finding(
        rule=RULE,
        title=f"Tensor parallel group {worst.name} of {size} ranks spans hosts: its collectives take "
        f"{worst.comm_us / facts.step_time_us:.0%} of the step",
        severity=Severity.of_share(bound_us / facts.step_time_us),
        evidence=_evidence(worst, exposed_us, now, inside),
        action=Action(
            setting="tensor parallel degree",
            old=str(size),
            new=None if here is None else str(min(size, here)),
            how=_how(facts, size, here),
            costs="With a smaller degree each rank holds more of every layer, unless pipeline stages take over.",
        ),
        confidence=sure(facts, Confidence.MEDIUM if now and inside else Confidence.LOW),
        obtained=Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, bound_us),
    )


def _busbw(facts: JobFacts, like: GroupRow, *, across: bool) -> float | None:
    """Best bus bandwidth, GB/s, of groups that span hosts as this one does, or of those that do not."""
    names = {row.name for row in facts.groups if row.across_hosts is across and (not across or row.name == like.name)}
    rates = [row.busbw_gbps for row in facts.collectives if row.group in names and row.busbw_gbps]
    return max(rates, default=None)


def _ranks_on_host(facts: JobFacts) -> int | None:
    sizes = {run.local_world_size for run in facts.runs.values()}
    return min(sizes) if sizes else None


def _how(facts: JobFacts, size: int, here: int | None) -> str:
    if here is not None and size <= here:
        # It would fit: its ranks are not neighbours.
        return (
            f"Give each host's {here} consecutive ranks to one group: tensor parallelism must be the innermost "
            'dimension of the mesh, init_device_mesh(…, mesh_dim_names=(…, "tp")); Megatron: "tp" first.'
        )
    degree = "as many ranks as a host has" if here is None else str(here)
    if framework(facts) == "megatron" or settings_of(facts, "megatron"):
        return f"--tensor-model-parallel-size {degree}, and --pipeline-model-parallel-size larger by as much."
    return f"A tensor dimension of {degree} in init_device_mesh(…), and pipeline stages or FSDP across hosts."


def _evidence(group: GroupRow, exposed_us: float, now: float | None, inside: float | None) -> tuple[Evidence, ...]:
    rows = [
        Evidence(what="its collectives per step", value=group.comm_us, unit="us", ranks=group.ranks),
        Evidence(what="exposed communication transfer per step (median)", value=exposed_us, unit="us"),
    ]
    if now is not None:
        rows.append(Evidence(what="its bus bandwidth", value=now, unit="GB/s", ranks=group.ranks))
    if inside is not None:
        rows.append(Evidence(what="bus bandwidth inside a host", value=inside, unit="GB/s"))
    return tuple(rows)
