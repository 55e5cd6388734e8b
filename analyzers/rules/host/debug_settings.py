"""Debugging left on: fires when a switch that makes every step slower is set in the recorded run.

A recording with such a switch on does not show what it costs, only the time that it can affect: that is the ceiling.
"""

from __future__ import annotations

from itertools import groupby
from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.frozen import dataclass
from perfscope.results.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, code

RULE: Final = "debug-settings"

_HOST: Final = ("idle_sync", "idle_launch", "idle_host")
"""Categories in which a device waits for its host."""
_EXPOSED: Final = ("exposed_comm_wait", "exposed_comm_transfer")


@dataclass(frozen=True)
class _Switch:
    """A switch that is on."""

    name: str
    value: str
    off: str
    """What to write to turn it off."""
    language: str
    why: str
    rows: tuple[str, ...]
    """Categories that it can lengthen."""
    ranks: tuple[int, ...]


def launches_block(job: RuleContext) -> bool:
    """Does every launch wait for its kernel, so that idle time does not depend on launches or synchronizations?"""
    return any(switch.name in ("CUDA_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL") for switch in _switches(job))


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, with all that are on; None where none is, or no settings were recorded."""
    switches = _switches(job)
    if not switches:
        return None
    recoverable = sum(job.typical_us(row) for row in _rows(switches, job))
    bound = min(recoverable, 0.999 * job.step_time_us)
    costs_nothing = bound < 0.02 * job.step_time_us
    named = ", ".join(f"{switch.name}={switch.value}" for switch in switches)
    first = switches[0]
    return Finding(
        rule=RULE,
        title=f"Debugging is left on: {named}",
        severity=Severity.INFO if costs_nothing else Severity.of_share(job.share(bound)),
        evidence=tuple(
            Evidence(f"ranks with {switch.name}={switch.value}", len(switch.ranks), ranks=switch.ranks)
            for switch in switches
        ),
        action=Action(
            setting=first.name,
            old=first.value,
            new=None,
            how="\n".join(
                code(language, "\n".join(f"{switch.off}  # {switch.why}" for switch in group))
                for language, group in groupby(switches, key=lambda switch: switch.language)
            ),
        ),
        confidence=Confidence.MEDIUM,
        obtained=Obtained.BOUNDED,
        ceiling=None if costs_nothing else job.ceiling(bound),
    )  # fmt: skip


def _rows(switches: list[_Switch], job: RuleContext) -> list[str]:
    """Every category that one of them can lengthen, once."""
    if job.on_devices:
        return sorted({row for switch in switches for row in switch.rows})
    # There the host computes, so operators themselves take longer; no device waits for it.
    rows = {row for switch in switches if switch.name not in _OF_DEVICES for row in switch.rows}
    return sorted(rows | ({"compute"} if "idle_launch" in rows else set()))


def _switches(job: RuleContext) -> list[_Switch]:
    switches = [
        _Switch(name, value, f"unset {name}", "shell", why, rows, ranks)
        for name, values, why, rows in _VARIABLES
        for value, ranks in job.environment.get(name, {}).items()
        if value.strip().lower() in values
    ]
    anomaly = tuple(
        rank for rank, run in sorted(job.runs.items()) if run.settings.get("autograd", {}).get("detect_anomaly")
    )
    if anomaly:
        trainer = job.framework == "lightning"
        off = "trainer = Trainer(detect_anomaly=False)" if trainer else "torch.autograd.set_detect_anomaly(False)"
        why = "every operator of the forward stores its stack, and the backward checks every gradient for NaN."
        switches.append(_Switch("detect_anomaly", "True", off, "python", why, _HOST, anomaly))
    return switches


_VARIABLES: Final = (
    ("CUDA_LAUNCH_BLOCKING", ("1", "true", "on", "yes"),
     "every launch waits until its kernel has ended, so host and device never overlap.", _HOST),
    ("AMD_SERIALIZE_KERNEL", ("1", "2", "3"), "kernels wait for each other, so host and device never overlap.", _HOST),
    ("TORCH_DISTRIBUTED_DEBUG", ("detail",),
     "every collective is first checked across ranks by additional collectives.", _EXPOSED + _HOST),
    ("NCCL_DEBUG", ("trace",), "NCCL writes a line for each of its operations.", _EXPOSED + _HOST),
)  # fmt: skip
"""(variable, values that cost time, why, categories that it can lengthen)."""
_OF_DEVICES: Final = ("CUDA_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL", "NCCL_DEBUG")
"""Those that make no difference where ranks train on CPUs."""
