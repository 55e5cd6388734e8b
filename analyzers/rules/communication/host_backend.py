"""Collectives of tensors on devices by a backend of the host: fires when gloo carries them out and the step waits.

gloo copies each tensor to the host, exchanges it over TCP and copies it back; NCCL's kernels go from device to device
over NVLink, PCIe or RDMA. Source: torch.distributed documentation, "Which backend to use?": NCCL for GPU training.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Action, Confidence, Finding

RULE: Final = "nccl-backend"
SHARE: Final = 0.05
"""Least share of the step that is exposed communication."""

_NVIDIA: Final = "NVIDIA"


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: another backend, no NVIDIA device, or nothing that the step waits for."""
    if not on_host(job) or not all(_NVIDIA in device for device in job.info.devices):
        return None
    exposed_us = job.exposed_transfer_us
    if exposed_us < SHARE * job.step_time_us:
        return None
    backend = job.info.backend or "gloo"
    return job.finding(
        RULE,
        f"{backend} carries out collectives of tensors on devices through the host's memory: exposed transfer takes "
        f"{job.share(exposed_us):.0%} of the step",
        exposed_us,
        evidence=(job.exposed_transfer(),),
        action=Action(
            setting="init_process_group(backend=…)",
            old=f'"{backend}"',
            new='"nccl"',
            how=_HOW,
            costs="NCCL needs a device of its own for each rank.",
        ),
        confidence=Confidence.LOW if job.info.few_steps else Confidence.MEDIUM,
    )


def on_host(job: RuleContext) -> bool:
    """Does a backend of the host carry out collectives of tensors on devices?"""
    return job.on_devices and job.collectives_on_host


_HOW: Final = (
    'Call torch.distributed.init_process_group("nccl"), or "cpu:gloo,cuda:nccl" where tensors on the host are sent as '
    "well."
)
