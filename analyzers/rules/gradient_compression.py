"""Gradients in 16 bits on the wire: fires when the all-reduce of fp32 gradients is exposed and bandwidth-bound.

``bf16_compress_hook`` casts each bucket, reduces half the bytes and casts back (torch
``distributed/algorithms/ddp_comm_hooks/default_hooks.py``). Where starting the collectives is what takes time, halving
their bytes brings nothing; on CPUs gloo adds halves one by one, and it may cost time.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.ddp_arguments import setting, trainer_ddp
from perfscope.analyzers.rules.frameworks import framework
from perfscope.analyzers.rules.traffic import Traffic, on_devices, replayed, sure, traffic
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling

RULE: Final = "gradient-compression"
SHARE: Final = 0.05
"""Share of the step that must be saved."""
LATENCY: Final = 0.5
"""Share of the transfer that is starting costs up to which it counts as bandwidth-bound."""
_NO_BF16: Final = ("V100", "T4", "P100", "RTX 20", "Quadro RTX")
"""Devices without bf16 arithmetic: these take fp16."""
_HOOKS: Final = {"bf16": "bf16_compress_hook", "fp16": "fp16_compress_hook"}


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: no fp32 gradients of DDP on devices, hidden, latency-bound, or compressed already."""
    if not facts.torch_ddp or not on_devices(facts) or setting(facts, "comm_hook"):
        return None
    gradients = traffic(facts, "all_reduce")
    if gradients is None or gradients.dtype != "float32":
        return None
    exposed_us = facts.typical_us("exposed_comm_transfer")
    if exposed_us < SHARE * facts.step_time_us or (gradients.latency_share or 0.0) > LATENCY:
        return None
    dtype = "fp16" if any(name in device for device in facts.devices for name in _NO_BF16) else "bf16"
    change = {"ddp.comm_dtype": dtype}
    found = replayed(facts, change, SHARE)
    if found is None:
        return None
    prediction, saved_us = found
    return Finding(
        rule=RULE,
        title=f"{exposed_us / facts.step_time_us:.0%} of the step is exposed all-reduce of fp32 gradients, which could "
        "travel in 16 bits",
        severity=Severity.of_share(saved_us / facts.step_time_us),
        evidence=_evidence(facts, gradients, exposed_us),
        action=Action(
            setting="DDP communication hook",
            old="none",
            new=_HOOKS[dtype],
            how=_how(facts, dtype),
            costs="Precision: gradients are rounded to 16 bits before they are added up"
            + (" (fp16 also overflows beyond 65,504)" if dtype == "fp16" else "")
            + "; compare the loss curves. A cast of each bucket.",
        ),
        confidence=sure(facts, Confidence.MEDIUM),
        obtained=Obtained.REPLAYED,
        ceiling=ceiling(facts.step_time_us, saved_us),
        predicted_step_ns=prediction,
        whatif=change,
    )


def _evidence(facts: JobFacts, gradients: Traffic, exposed_us: float) -> tuple[Evidence, ...]:
    rows = [
        Evidence(what="exposed communication transfer per step", value=exposed_us, unit="us", ranks=facts.ranks),
        Evidence(what="fp32 gradient bytes per step", value=gradients.bytes, unit="bytes", ranks=gradients.ranks),
    ]
    if gradients.latency_share is not None:
        share = gradients.latency_share
        rows.append(Evidence(what="share of the all-reduce time that is starting them", value=share, unit="share"))
    return tuple(rows)


def _how(facts: JobFacts, dtype: str) -> str:
    hook = _HOOKS[dtype]
    used = framework(facts)
    kind = f"comm_hook=DDPCommunicationHookType.{dtype.upper()}"
    if used == "transformers":
        return trainer_ddp(kind)
    if used == "accelerate":
        return f"Accelerator(kwargs_handlers=[DistributedDataParallelKwargs({kind})])"
    if used == "lightning":
        return f"Trainer(strategy=DDPStrategy(ddp_comm_hook=default_hooks.{hook}))"
    return (
        f"model.register_comm_hook(state=None, hook=default_hooks.{hook}) on the DistributedDataParallel model, with "
        "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks"
    )
