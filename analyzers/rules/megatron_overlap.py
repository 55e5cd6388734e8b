"""Megatron's overlap flags: fires when gradients are reduced after the backward, or parameters gathered before the
forward, although both could run meanwhile.

``--overlap-grad-reduce`` reduces buckets as the backward fills them, ``--overlap-param-gather`` (with the distributed
optimizer) gathers each bucket's parameters when the forward comes to it. At most what is exposed is saved: a bound.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.frameworks import settings_of
from perfscope.analyzers.rules.traffic import Traffic, gib, sure, traffic
from perfscope.findings import Action, Evidence, Finding, Obtained, Severity, ceiling

RULE: Final = "megatron-overlap"
SHARE: Final = 0.05
"""Share of the step that must be recoverable at most."""
_FLAGS: Final = (
    ("overlap_grad_reduce", "--overlap-grad-reduce", ("reduce_scatter", "all_reduce"), "Gradients are reduced"),
    ("overlap_param_gather", "--overlap-param-gather", ("all_gather",), "Parameters are gathered"),
)


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: no Megatron, both flags set or not known, or little that is exposed."""
    megatron = settings_of(facts, "megatron")
    exposed_us = facts.typical_us("exposed_comm_transfer")
    data = {row.name for row in facts.groups if row.role in ("data", "shard", "world")}
    for name, flag, kinds, what in _FLAGS:
        moved = traffic(facts, *kinds)
        if megatron.get(name) is not False or moved is None or moved.group not in data:
            continue
        if name == "overlap_param_gather" and not megatron.get("use_distributed_optimizer"):
            continue
        bound_us = min(moved.transfer_us, exposed_us)
        if bound_us >= SHARE * facts.step_time_us:
            return _finding(facts, moved, bound_us, flag, what)
    return None


def _finding(facts: JobFacts, moved: Traffic, bound_us: float, flag: str, what: str) -> Finding:
    with_reductions = " (needs --overlap-grad-reduce)" if "param" in flag else ""
    return Finding(
        rule=RULE,
        title=f"{what} while nothing computes: up to {bound_us / facts.step_time_us:.0%} of the step",
        severity=Severity.of_share(bound_us / facts.step_time_us),
        evidence=(
            Evidence(what=f"{moved.kind} transfer per step", value=moved.transfer_us, unit="us", ranks=moved.ranks),
            Evidence(
                what="exposed communication transfer per step (median)",
                value=facts.typical_us("exposed_comm_transfer"), unit="us", ranks=facts.ranks,
            ),
        ),
        action=Action(
            setting=flag, old="not set", new="set", how=f"{flag}{with_reductions} on Megatron's command line.",
            costs=f"Buckets in flight: about {gib(2 * moved.largest)} on each rank.",
        ),
        confidence=sure(facts),
        obtained=Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, bound_us),
    )  # fmt: skip
