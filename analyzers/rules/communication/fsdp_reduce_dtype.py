"""The type in which FSDP reduces gradients: fires when parameters are gathered in 16 bits, gradients are reduced in
fp32, and that is exposed.

``MixedPrecisionPolicy(reduce_dtype=…)`` (FSDP2) and ``MixedPrecision(reduce_dtype=…)`` (FSDP1) choose it. In the type
of the parameters gradients have half the bytes. fp32 sums are more exact, which is why some ask for them.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.communication.traffic import CollectiveTraffic, traffic
from perfscope.analyzers.rules.context import RuleContext, known
from perfscope.analyzers.rules.typed import fsdp1, fsdp2
from perfscope.results.findings import Action, Confidence, Evidence, Finding

RULE: Final = "fsdp-reduce-dtype"
SHARE: Final = 0.05
"""Least share of the step that must be saved."""
_SENT: Final = {"bfloat16": "bf16", "float16": "fp16"}


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no FSDP, gradients reduced in the type of the parameters, or little to save."""
    if "fsdp" not in job.info.strategies or job.settings("megatron"):
        return None
    gathered, scattered = traffic(job, "all_gather"), traffic(job, "reduce_scatter")
    if gathered is None or scattered is None or scattered.dtype != "float32" or gathered.dtype not in _SENT:
        return None
    change = {"fsdp.reduce_dtype": _SENT[gathered.dtype]}
    replayed = job.replayed(change, SHARE)
    if replayed is None:
        return None
    prediction, saved_us = replayed
    return job.finding(
        RULE,
        f"Gradients are reduced in fp32, parameters gathered in {_SENT[gathered.dtype]}: "
        f"{job.exposed_share:.0%} of the step is exposed transfer",
        saved_us,
        evidence=(
            job.exposed_transfer(),
            Evidence("fp32 gradient bytes per step", scattered.bytes, "bytes", scattered.ranks),
            *known("latency as a share of the reduce-scatter time", scattered.latency_share, "share"),
        ),
        action=_action(job, gathered),
        confidence=job.confidence(Confidence.MEDIUM),
        predicted=prediction,
        whatif=change,
    )


def _action(job: RuleContext, gathered: CollectiveTraffic) -> Action:
    dtype = f"torch.{gathered.dtype}"
    policy = f"(param_dtype={dtype}, reduce_dtype={dtype})"
    version = job.settings("fsdp").get("version")
    how = (
        fsdp1("MixedPrecision", before="import torch", mixed_precision=f"MixedPrecision{policy}")
        if version == 1
        else fsdp2("MixedPrecisionPolicy", before="import torch", mp_policy=f"MixedPrecisionPolicy{policy}")
    )
    return Action(
        setting="MixedPrecision(reduce_dtype=…)" if version == 1 else "MixedPrecisionPolicy(reduce_dtype=…)",
        old="torch.float32",
        new=dtype,
        how=how,
        costs="Precision: gradients are rounded to 16 bits before they are summed; compare the loss curves.",
    )
