"""Offload: fires when parameters or optimizer states live in host memory and the step waits for their copies, or for
an optimizer that computes on the CPU. A trace alone shows that about as much is copied to the host as back, and that an
optimizer's step launches no kernels.

Sources: DeepSpeed config-json.md (``offload_optimizer``, ``offload_param``), torch FSDP ``CPUOffload``,
``CPUOffloadPolicy``.
"""

from __future__ import annotations

import json
from typing import Any, Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.cpu_optimizer import is_for_cpu, on_cpu_us
from perfscope.analyzers.rules.typed import fsdp1, fsdp2, in_deepspeed
from perfscope.frozen import dataclass
from perfscope.results.findings import Action, Confidence, Evidence, Finding

RULE: Final = "offload"
SHARE: Final = 0.05
"""Least share of the step that is exposed copies."""
BOTH_WAYS: Final = 0.5
"""Where nothing is known of the settings, so much of the copies in one direction goes in the other, too: gradients and
parameters, or activations. Batches go to the device only, and outputs to the host only."""

_SETTINGS: Final = """\
DeepSpeed's offload_optimizer, FSDP's CPUOffload or CPUOffloadPolicy, Megatron's --optimizer-cpu-offload"""
_ON_DEVICES: Final = f"""\
If the devices have enough free memory, keep gradients, parameters and optimizer states there ({_SETTINGS}): then \
nothing is copied, and the optimizer takes a few kernels."""
_ON_CPU: Final = """\
Else a fused optimizer of the CPU (DeepSpeedCPUAdam, \
torch.optim.AdamW(fused=True)) takes least, and more processor cores make it quicker (OMP_NUM_THREADS)."""
_MORE_CORES: Final = "Else more processor cores make it quicker (OMP_NUM_THREADS)."
_UNKNOWN: Final = f"""\
The trace does not show what is copied: gradients and parameters for an optimizer on the CPU ({_SETTINGS}), or \
activations (torch.autograd.graph.save_on_cpu). If the device has enough free memory, keep them there. Else copy from \
and to pinned memory (non_blocking=True) on a stream of its own, while the device computes."""


@dataclass(frozen=True)
class Offload:
    """Something that is stored in host memory."""

    setting: str
    now: str
    off: str
    """What to write to store it on the device."""
    pinned: bool | None
    """None where there is no such setting, or it is not known."""
    pin: str
    """What to write to pin its buffers."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: nothing is offloaded, or its copies are overlapped."""
    offloaded = offloads(job)
    exposed, computing = job.typical_us("exposed_copy"), on_cpu_us(job)
    if computing >= SHARE * job.step_time_us:
        return _of_optimizer(job, offloaded, exposed, computing)
    if exposed < SHARE * job.step_time_us:
        return None
    to_host, to_device = (_copying_us(job, direction) for direction in ("DtoH", "HtoD"))
    if not offloaded:
        return _unnamed(job, exposed, to_host, to_device)
    unpinned = [offload for offload in offloaded if offload.pinned is False]
    first = (unpinned or offloaded)[0]
    return job.finding(
        RULE,
        f"Offloading costs {job.share(exposed):.0%} of the step in exposed copies",
        exposed,
        evidence=(
            Evidence("exposed copies per step (median)", exposed, "us", job.ranks),
            Evidence("all copies between host and device, per step", to_host + to_device, "us", job.ranks),
        ),
        action=Action(
            setting=first.setting,
            old="not pinned" if unpinned else first.now,
            new="pinned" if unpinned else "on the device",
            how="\n".join(
                [f"Copies from pinned buffers overlap compute.\n{offload.pin}" for offload in unpinned]
                + [f"If the device has enough free memory:\n{offload.off}" for offload in offloaded]
            ),
            costs="Without offloading: device memory. With pinned buffers: host memory that cannot be swapped.",
        ),
        confidence=Confidence.LOW if job.info.few_steps else Confidence.MEDIUM,
    )


def _of_optimizer(job: RuleContext, offloaded: tuple[Offload, ...], exposed: float, computing: float) -> Finding:
    """The finding about an optimizer on the CPU; times in µs per step."""
    settings = "\n".join(f"If the device has enough free memory:\n{offload.off}" for offload in offloaded)
    copying = f", and copies to and from it for {job.share(exposed):.0%}" if exposed >= SHARE * job.step_time_us else ""
    return job.finding(
        RULE,
        f"The optimizer computes on the CPU: devices wait for it for {job.share(computing):.0%} of the step{copying}",
        computing + exposed,
        evidence=(
            Evidence("optimizer's step, which launches no kernels", computing, "us", job.ranks),
            Evidence("exposed copies per step (median)", exposed, "us", job.ranks),
        ),
        action=Action(
            setting="device of the optimizer", old="CPU", new="the devices",
            how=f"{settings or _ON_DEVICES}\n{_MORE_CORES if is_for_cpu(job) else _ON_CPU}",
            costs="Device memory for gradients and optimizer states.",
        ),
        confidence=Confidence.LOW if job.info.few_steps else Confidence.MEDIUM,
    )  # fmt: skip


def _unnamed(job: RuleContext, exposed: float, to_host: float, to_device: float) -> Finding | None:
    """The finding where only copies tell that something is offloaded; times in µs per step."""
    exposed = min(exposed, to_host + to_device)
    if exposed < SHARE * job.step_time_us or min(to_host, to_device) < BOTH_WAYS * max(to_host, to_device):
        return None
    return job.finding(
        RULE,
        f"The devices wait for copies to the host and back for {job.share(exposed):.0%} of the step: something is "
        "offloaded",
        exposed,
        evidence=(
            Evidence("exposed copies per step (median)", exposed, "us", job.ranks),
            Evidence("copies to the host, per step", to_host, "us", job.ranks),
            Evidence("copies to the device, per step", to_device, "us", job.ranks),
        ),
        action=Action(
            setting="offloading to the host", old="exposed copies", new="on the device, or overlapped", how=_UNKNOWN,
            costs="Without offloading: device memory.",
        ),
        confidence=Confidence.LOW if job.info.few_steps else Confidence.MEDIUM,
    )  # fmt: skip


def offloads(job: RuleContext) -> tuple[Offload, ...]:
    """What the run stores in host memory, according to its settings."""
    zero = job.settings("deepspeed").get("zero_optimization") or {}
    offloaded = [
        *filter(None, (_of_deepspeed(name, zero.get(name)) for name in ("offload_param", "offload_optimizer")))
    ]
    fsdp, megatron = job.settings("fsdp"), job.settings("megatron")
    if fsdp.get("cpu_offload"):
        offloaded.append(Offload("FullyShardedDataParallel(cpu_offload=…)", "True", fsdp1(cpu_offload=None), None, ""))
    if fsdp.get("offload"):
        how = fsdp2("OffloadPolicy", offload_policy="OffloadPolicy()")
        offloaded.append(Offload("fully_shard(offload_policy=…)", "CPUOffloadPolicy", how, None, ""))
    if megatron.get("optimizer_cpu_offload"):
        offloaded.append(
            Offload("--optimizer-cpu-offload", "on", "The command without --optimizer-cpu-offload.", None, "")
        )
    return tuple(offloaded)


def _zero(name: str, section: dict[str, Any]) -> str:
    return in_deepspeed(json.dumps({"zero_optimization": {name: section}}))


def _of_deepspeed(name: str, section: Any) -> Offload | None:
    if not isinstance(section, dict) or section.get("device") in (None, "none"):
        return None
    return Offload(
        f'"{name}"',
        str(section["device"]),
        _zero(name, {"device": "none"}),
        bool(section["pin_memory"]) if "pin_memory" in section else None,
        _zero(name, {"device": section["device"], "pin_memory": True}),
    )


def _copying_us(job: RuleContext, direction: str) -> float:
    """Copies between host and device in one direction, µs per step."""
    rows = (row for row in job.summary.kernels if row.category == "copy")
    return sum(row.us_per_step for row in rows if direction in row.name)
