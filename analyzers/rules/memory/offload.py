"""Offload: fires when parameters or optimizer states live in host memory and the step waits for their copies.

Sources: DeepSpeed config-json.md (``offload_optimizer``, ``offload_param``), torch FSDP ``CPUOffload``,
``CPUOffloadPolicy``.
"""

from __future__ import annotations

import json
from typing import Any, Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.typed import fsdp1, fsdp2, in_deepspeed
from perfscope.frozen import dataclass
from perfscope.results.findings import Action, Confidence, Evidence, Finding

RULE: Final = "offload"
SHARE: Final = 0.05
"""Least share of the step that is exposed copies."""


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
    exposed = job.typical_us("exposed_copy")
    if not offloaded or exposed < SHARE * job.step_time_us:
        return None
    copies = sum(row.us_per_step for row in job.summary.kernels if row.category == "copy" and _is_transfer(row.name))
    unpinned = [offload for offload in offloaded if offload.pinned is False]
    first = (unpinned or offloaded)[0]
    return job.finding(
        RULE,
        f"Offloading costs {job.share(exposed):.0%} of the step in exposed copies",
        exposed,
        evidence=(
            Evidence("exposed copies per step (median)", exposed, "us", job.ranks),
            Evidence("all copies between host and device, per step", copies, "us", job.ranks),
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


def _is_transfer(name: str) -> bool:
    return "HtoD" in name or "DtoH" in name
