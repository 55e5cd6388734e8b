"""Gradients in 16 bits on the wire: fires when the all-reduce of fp32 gradients is exposed and bandwidth-bound.

``bf16_compress_hook`` casts each bucket, reduces half the bytes and casts back (torch
``distributed/algorithms/ddp_comm_hooks/default_hooks.py``). Where latency dominates, halving the
bytes brings nothing. On CPUs gloo adds halves one by one, which may take longer: there even the high end of the
prediction must save time.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.communication.ddp_arguments import accelerator_ddp, lightning_ddp, setting, trainer_ddp
from perfscope.analyzers.rules.communication.traffic import CollectiveTraffic, traffic
from perfscope.analyzers.rules.context import RuleContext, known
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code

RULE: Final = "gradient-compression"
SHARE: Final = 0.05
"""Share of the step that must be saved."""
LATENCY: Final = 0.5
"""The transfer is bandwidth-bound when latency is at most this share of it."""
LONG_US: Final = 200.0
"""Where sizes are not recorded, mean transfer of which at least half is no latency, which takes 10 to 100 µs."""
_NO_BF16: Final = ("V100", "T4", "P100", "RTX 20", "Quadro RTX")
"""Devices without bf16 arithmetic: these take fp16."""
_HOOKS: Final = {"bf16": "bf16_compress_hook", "fp16": "fp16_compress_hook"}
_TYPES: Final = {"bf16": "bfloat16", "fp16": "float16"}
_BY_HAND: Final = """\
for gradient in (p.grad for p in model.parameters() if p.grad is not None):
    sent = gradient.to(torch.{dtype}) / torch.distributed.get_world_size()
    torch.distributed.all_reduce(sent)
    gradient.copy_(sent)"""
"""What to type without DDP."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no fp32 gradients of DDP, or of what may be DDP, or overlapped, latency-bound or compressed
    ones; on CPUs also where sums in 16 bits may take what the transfer saves.
    """
    if not (job.torch_ddp or job.reduced_by_unknown) or setting(job, "comm_hook"):
        return None
    gradients = traffic(job, "all_reduce")
    exposed_us = job.exposed_transfer_us if gradients is None else job.exposed_of_us(gradients.transfer_us)
    if exposed_us < SHARE * job.step_time_us or not _are_large(job, gradients):
        return None
    dtype = "fp16" if any(name in device for device in job.info.devices for name in _NO_BF16) else "bf16"
    change = {"ddp.comm_dtype": dtype}
    if not job.could_save(change, SHARE):
        return None
    prediction = job.predict(change) if job.predict is not None else None
    if prediction is None and (gradients is not None or not job.on_devices):
        return None
    if prediction is not None and not job.on_devices and prediction.high > (1 - SHARE) * job.step_time_us:
        return None
    # Without their sizes, where nothing can be replayed, it is a bound: half of what is exposed.
    saved_us = exposed_us / 2 if prediction is None else job.step_time_us - prediction.mid
    if saved_us < SHARE * job.step_time_us:
        return None
    return job.finding(
        RULE,
        f"{job.share(exposed_us):.0%} of the step is exposed all-reduce of fp32 gradients; 16 bits halve the bytes",
        saved_us,
        evidence=(
            job.exposed_transfer(),
            *(
                ()
                if gradients is None
                else (
                    Evidence("fp32 gradient bytes per step", gradients.bytes, "bytes", gradients.ranks),
                    *known("latency as a share of the all-reduce time", gradients.latency_share, "share"),
                )
            ),
        ),
        action=Action(
            setting="DDP communication hook" if job.torch_ddp else "type of the gradients on the wire",
            old="none" if job.torch_ddp else "fp32",
            new=_HOOKS[dtype] if job.torch_ddp else dtype,
            how=_how(job, dtype),
            costs="Precision: gradients are rounded to 16 bits before the reduction"
            + (" (fp16 also overflows beyond 65,504)" if dtype == "fp16" else "")
            + "; compare the loss curves. Each bucket is cast twice.",
        ),
        confidence=job.confidence(Confidence.MEDIUM),
        predicted=prediction,
        whatif=change,
    )


def _are_large(job: RuleContext, gradients: CollectiveTraffic | None) -> bool:
    """Are fp32 gradients reduced, and is that no matter of latency?"""
    if gradients is not None:
        return gradients.dtype == "float32" and (gradients.latency_share or 0.0) <= LATENCY
    rows = [row for row in job.summary.collectives if row.kind == "all_reduce" and row.dtype == "float32"]
    transfer_us, count = sum(row.transfer_us * row.count for row in rows), sum(row.count for row in rows)
    return job.steps > 0 and transfer_us >= LONG_US * count > 0


def _how(job: RuleContext, dtype: str) -> str:
    hook = _HOOKS[dtype]
    used = job.framework
    kind = f"comm_hook=DDPCommunicationHookType.{dtype.upper()}"
    imported = "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
    if used == "transformers":
        return trainer_ddp(kind, "DDPCommunicationHookType")
    if used == "accelerate":
        return accelerator_ddp(kind, "DDPCommunicationHookType")
    if used == "lightning":
        return lightning_ddp(used, f"ddp_comm_hook=default_hooks.{hook}", imported)
    loop = "\nIn a loop of your own:\n" + code("python", _BY_HAND.format(dtype=_TYPES[dtype]))
    # Fabric passes on methods of the user's own model, not those of the wrapper in between.
    wrapper = "model._forward_module" if used == "fabric" else "model"
    return (
        "On the DistributedDataParallel model, before the first step:\n"
        + code("python", f"{imported}{wrapper}.register_comm_hook(state=None, hook=default_hooks.{hook})")
        + ("" if job.torch_ddp else loop)
    )
