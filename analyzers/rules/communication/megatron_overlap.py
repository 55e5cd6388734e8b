"""Megatron's overlap flags: fires when gradients are reduced after the backward, or parameters gathered before the
forward, although both could overlap compute.

``--overlap-grad-reduce`` reduces buckets as the backward fills them, ``--overlap-param-gather`` (with the distributed
optimizer) gathers each bucket's parameters when the forward comes to it. At most what is exposed is saved: a bound.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.communication.traffic import CollectiveTraffic, traffic
from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Action, Evidence, Finding, code
from perfscope.text import byte_size

RULE: Final = "megatron-overlap"
SHARE: Final = 0.05
"""Share of the step that must be recoverable at most."""
_FLAGS: Final = (
    ("overlap_grad_reduce", "--overlap-grad-reduce", ("reduce_scatter", "all_reduce"), "Gradients are reduced"),
    ("overlap_param_gather", "--overlap-param-gather", ("all_gather",), "Parameters are gathered"),
)


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no Megatron, both flags set or not known, or little exposed transfer."""
    megatron = job.settings("megatron")
    data = {row.name for row in job.summary.groups if row.role in ("data", "shard", "world")}
    for name, flag, kinds, what in _FLAGS:
        moved = traffic(job, *kinds)
        if megatron.get(name) is not False or moved is None or moved.group not in data:
            continue
        if name == "overlap_param_gather" and not megatron.get("use_distributed_optimizer"):
            continue
        bound_us = min(moved.transfer_us, job.exposed_transfer_us)
        if bound_us >= SHARE * job.step_time_us:
            return _finding(job, moved, bound_us, flag, what)
    return None


def _finding(job: RuleContext, moved: CollectiveTraffic, bound_us: float, flag: str, what: str) -> Finding:
    with_reductions = "--overlap-grad-reduce " if "param" in flag else ""  # which it needs
    return job.finding(
        RULE,
        f"{what} without overlap: up to {job.share(bound_us):.0%} of the step",
        bound_us,
        evidence=(
            Evidence(f"{moved.kind} transfer per step", moved.transfer_us, "us", moved.ranks),
            job.exposed_transfer(),
        ),
        action=Action(
            setting=flag,
            old="not set",
            new="set",
            how="On Megatron's command line:\n" + code("shell", f"{with_reductions}{flag}"),
            costs=f"Buckets in flight: about {byte_size(2 * moved.largest)} per rank.",
        ),
        confidence=job.confidence(),
    )
