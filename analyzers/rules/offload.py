"""Offload: fires when parameters or optimizer states live in host memory and the step waits for their copies.

Sources: DeepSpeed config-json.md (``offload_optimizer``, ``offload_param``), torch FSDP ``CPUOffload``,
``CPUOffloadPolicy``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.frameworks import settings_of
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling

RULE: Final = "offload"
SHARE: Final = 0.05
"""Share of the step that copies take, uncovered, from which the rule fires."""


@dataclass(frozen=True)
class Offload:
    """One thing that is kept on the host."""

    setting: str
    now: str
    off: str
    """What to write to keep it on the device."""
    pinned: bool | None
    """None where there is no such setting, or nothing tells."""
    pin: str
    """What to write to pin its buffers."""


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: nothing is offloaded, or its copies are hidden."""
    found = offloads(facts)
    exposed = facts.typical_us("exposed_copy")
    if not found or exposed < SHARE * facts.step_time_us:
        return None
    unpinned = [offload for offload in found if offload.pinned is False]
    first = (unpinned or found)[0]
    share = exposed / facts.step_time_us
    return Finding(
        rule=RULE,
        title=f"Offloading costs {share:.0%} of the step in copies that nothing hides",
        severity=Severity.of_share(share),
        evidence=(
            Evidence(what="copies that no computation hides (median)", value=exposed, unit="us", ranks=facts.ranks),
            Evidence(
                what="copies between host and device, all",
                value=sum(
                    row.us_per_step for row in facts.kernels if row.category == "copy" and _is_transfer(row.name)
                ),
                unit="us",
                ranks=facts.ranks,
            ),
        ),
        action=Action(
            setting=first.setting,
            old="not pinned" if unpinned else first.now,
            new="pinned" if unpinned else "on the device",
            how=_how(found, unpinned),
            costs="Device memory where it is turned off; host memory that cannot be swapped where it is pinned.",
        ),
        confidence=Confidence.LOW if facts.few_steps else Confidence.MEDIUM,
        obtained=Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, exposed),
    )


def offloads(facts: JobFacts) -> tuple[Offload, ...]:
    """What the run keeps in host memory, as its settings say."""
    zero = settings_of(facts, "deepspeed").get("zero_optimization") or {}
    found = [
        offload
        for name in ("offload_param", "offload_optimizer")
        if (offload := _of_deepspeed(name, zero.get(name))) is not None
    ]
    fsdp, megatron = settings_of(facts, "fsdp"), settings_of(facts, "megatron")
    if fsdp.get("cpu_offload"):
        found.append(Offload("FullyShardedDataParallel(cpu_offload=…)", "True", "cpu_offload=None", None, ""))
    if fsdp.get("offload"):
        found.append(
            Offload(
                "fully_shard(offload_policy=…)", "CPUOffloadPolicy", "fully_shard(…) without offload_policy", None, ""
            )
        )
    if megatron.get("optimizer_cpu_offload"):
        found.append(Offload("--optimizer-cpu-offload", "on", "without --optimizer-cpu-offload", None, ""))
    return tuple(found)


def _of_deepspeed(name: str, section: Any) -> Offload | None:
    if not isinstance(section, dict) or section.get("device") in (None, "none"):
        return None
    return Offload(
        f'"{name}"',
        str(section["device"]),
        f'"{name}": {{"device": "none"}} in "zero_optimization" of the DeepSpeed JSON',
        bool(section["pin_memory"]) if "pin_memory" in section else None,
        f'"{name}": {{"device": "{section["device"]}", "pin_memory": true}} in "zero_optimization"',
    )


def _is_transfer(name: str) -> bool:
    return "HtoD" in name or "DtoH" in name


def _how(found: tuple[Offload, ...], unpinned: list[Offload]) -> str:
    lines = [f"{offload.pin}: copies from pinned buffers run beside computation." for offload in unpinned]
    lines += [f"Where the device has room: {offload.off}." for offload in found]
    return "\n".join(lines)
