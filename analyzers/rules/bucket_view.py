"""DDP ``gradient_as_bucket_view``: fires when gradients are copied out of their buckets for a share of the step, or
device memory is tight and holds every gradient twice.

Without it DDP copies each gradient into its bucket and back, and keeps both (torch ``nn/parallel/distributed.py``). The
copy back runs in ``copy_bucket_to_grad`` (``reducer.cpp``).
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.ddp_arguments import setting, written
from perfscope.analyzers.rules.traffic import gib, on_devices, room_bytes, sure
from perfscope.findings import Action, Evidence, Finding, Obtained, Severity, ceiling

RULE: Final = "ddp-bucket-view"
SHARE: Final = 0.02
"""Share of the step that copies take from which the rule fires."""
TIGHT: Final = 0.05
"""Share of a device's memory below which what is free counts as tight."""
WORTH: Final = 0.02
"""Share of a device's memory that gradients take from which it helps to hold them once."""
COPIES: Final = "torch.distributed.ddp.reducer::copy_bucket_to_grad"


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: the setting is on or not known, copies are short, and memory is not tight."""
    if not facts.torch_ddp or setting(facts, "gradient_as_bucket_view") is not False:
        return None
    copies_us = _copies_us(facts)
    frees = _freed_when_tight(facts)
    long = copies_us >= SHARE * facts.step_time_us
    if not long and frees is None:
        return None
    why = f"takes {copies_us / facts.step_time_us:.0%} of the step" if long else f"holds {gib(frees or 0)} twice"
    evidence = [Evidence(what="copying gradients out of buckets per step", value=copies_us, unit="us")]
    if frees is not None:
        evidence.append(Evidence(what="gradients held twice", value=frees, unit="bytes"))
        evidence.append(Evidence(what="memory free on the fullest rank", value=room_bytes(facts) or 0, unit="bytes"))
    view = {"gradient_as_bucket_view": True}
    return Finding(
        rule=RULE,
        title=f"DDP copies gradients between parameters and buckets, which {why}",
        severity=Severity.of_share(copies_us / facts.step_time_us) if long else Severity.INFO,
        evidence=tuple(evidence),
        action=Action(
            setting="DistributedDataParallel(gradient_as_bucket_view=…)",
            old="False",
            new="True",
            how=written(facts, **view),
            costs="None in time or memory, which it frees; detach_() on gradients no longer works.",
        ),
        confidence=sure(facts),
        obtained=Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, copies_us) if long else None,
    )


def _copies_us(facts: JobFacts) -> float:
    """Per rank and step: on the device, or on the host where there is none."""
    rows = [row for row in facts.operators if row.name == COPIES]
    return sum(row.device_us_per_step if on_devices(facts) else row.host_us_per_step for row in rows)


def _freed_when_tight(facts: JobFacts) -> float | None:
    """Bytes that the setting frees, where memory is so full that they matter."""
    room = room_bytes(facts)
    capacity = min((row.capacity_bytes for row in facts.memory if row.capacity_bytes), default=None)
    gradients = setting(facts, "total_parameter_size_bytes")
    if room is None or capacity is None or not isinstance(gradients, int | float):
        return None
    return float(gradients) if room < TIGHT * capacity and gradients >= WORTH * capacity else None
