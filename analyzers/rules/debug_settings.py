"""Debugging left on: fires when a switch that makes every step slower is set in the recorded run.

What such a switch costs cannot be told from a recording in which it is on, except for the time that it can reach at
most: that is the ceiling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.frameworks import environment, settings_of
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling

RULE: Final = "debug-settings"

_ON: Final = ("1", "true", "on", "yes")
_HOST: Final = ("idle_sync", "idle_launch", "idle_host")
"""Rows in which a device waits for its host."""
_EXPOSED: Final = ("exposed_comm_wait", "exposed_comm_transfer")


@dataclass(frozen=True)
class _Switch:
    """A switch that is on."""

    name: str
    value: str
    off: str
    """What to write to turn it off."""
    why: str
    rows: tuple[str, ...]
    """Rows of the account that it can lengthen."""
    ranks: tuple[int, ...]


def launches_block(facts: JobFacts) -> bool:
    """Does every launch wait for its kernel, so that idle time says nothing about launches or syncs?"""
    return any(switch.name in ("CUDA_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL") for switch in _switches(facts))


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, naming all that are on; None where none is, or nothing was recorded beside the traces."""
    switches = _switches(facts)
    if not switches:
        return None
    recoverable = sum(facts.typical_us(row) for row in _rows(switches, facts))
    bound = min(recoverable, 0.999 * facts.step_time_us)
    costs_nothing = bound < 0.02 * facts.step_time_us
    named = ", ".join(f"{switch.name}={switch.value}" for switch in switches)
    first = switches[0]
    return Finding(
        rule=RULE,
        title=f"Debugging is left on: {named}",
        severity=Severity.INFO if costs_nothing else Severity.of_share(bound / facts.step_time_us),
        evidence=tuple(
            Evidence(what=f"ranks with {switch.name}={switch.value}", value=len(switch.ranks), unit="",
                     ranks=switch.ranks)
            for switch in switches
        ),
        action=Action(
            setting=first.name,
            old=first.value,
            new=None,
            how="\n".join(f"{switch.off}: {switch.why}" for switch in switches),
        ),
        confidence=Confidence.MEDIUM,
        obtained=Obtained.BOUNDED,
        ceiling=None if costs_nothing else ceiling(facts.step_time_us, bound),
    )  # fmt: skip


def _rows(switches: list[_Switch], facts: JobFacts) -> list[str]:
    """Every row that one of them can lengthen, once. Anomaly detection reaches all that is not waiting for others."""
    on_cpu = not facts.devices
    rows = {row for switch in switches for row in switch.rows}
    return sorted(rows | ({"compute"} if on_cpu and "idle_host" in rows else set()))


def _switches(facts: JobFacts) -> list[_Switch]:
    variables = environment(facts)
    found = []
    for name, values, why, rows in _VARIABLES:
        for value, ranks in variables.get(name, {}).items():
            if value.strip().lower() in values:
                found.append(_Switch(name, value, f"unset {name}", why, rows, ranks))
    anomaly = tuple(
        rank for rank, run in sorted(facts.runs.items()) if run.settings.get("autograd", {}).get("detect_anomaly")
    )
    if anomaly:
        lightning = settings_of(facts, "lightning")
        off = "Trainer(detect_anomaly=False)" if lightning else "torch.autograd.set_detect_anomaly(False)"
        why = "every operator of the forward keeps its stack, and every gradient is searched for NaN in the backward."
        found.append(_Switch("detect_anomaly", "True", off, why, _HOST, anomaly))
    return found


_VARIABLES: Final = (
    (
        "CUDA_LAUNCH_BLOCKING",
        _ON,
        "every launch waits until its kernel has ended, so host and device never work at the same time.",
        _HOST,
    ),
    (
        "AMD_SERIALIZE_KERNEL",
        ("1", "2", "3"),
        "kernels wait for each other, so host and device never work at the same time.",
        _HOST,
    ),
    (
        "TORCH_DISTRIBUTED_DEBUG",
        ("detail",),
        "every collective is first checked against all other ranks', by collectives of its own.",
        _EXPOSED + _HOST,
    ),
    (
        "NCCL_DEBUG",
        ("trace",),
        "NCCL writes a line for each of its operations.",
        _EXPOSED + _HOST,
    ),
)
"""(variable, values that cost time, why, rows of the account that it can lengthen)."""
