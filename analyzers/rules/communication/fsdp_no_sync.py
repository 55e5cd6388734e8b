"""FSDP under gradient accumulation: fires when gradients are reduced after every micro-batch.

Once per step is enough, as with DDP (``no_sync``). FSDP then holds whole gradients between micro-batches, not shards of
them. Source: torch ``FSDPModule.set_requires_gradient_sync``, ``FullyShardedDataParallel.no_sync``.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.communication import no_sync
from perfscope.analyzers.rules.communication.traffic import traffic
from perfscope.analyzers.rules.context import TORCH, RuleContext
from perfscope.results.findings import Action, Confidence, Finding
from perfscope.text import byte_size

RULE: Final = "fsdp-no-sync"
_OF_FSDP1: Final = no_sync.HOW[TORCH]
_OF_FSDP2: Final = (
    "Switch the reduction off in all micro-batches but the last:",
    (
        "for number, batch in enumerate(batches, 1):\n"
        "    model.set_requires_gradient_sync(number == len(batches))  # of the outermost module\n"
        "    loss_of(model, batch).backward()"
    ),
)


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None where gradients are reduced once per step, little would be saved, or memory is known to be
    too small for whole gradients.
    """
    change = {"fsdp.no_sync": "true"}
    replayed = job.replayed(change, no_sync.SHARE) if "fsdp" in job.info.strategies and job.steps else None
    if replayed is None:
        return None
    scattered, takes = traffic(job, "reduce_scatter"), None
    if scattered is not None:
        takes = scattered.bytes / no_sync.rounds(job) * (1 - 1 / max(len(scattered.ranks), 1))
    if job.lacks_memory(takes):
        return None
    version = job.fsdp_version
    own = _OF_FSDP1 if version == 1 else _OF_FSDP2
    sentence, typed = own if job.framework == TORCH else no_sync.HOW.get(job.framework, own)
    action = Action(
        setting="FullyShardedDataParallel.no_sync()" if version == 1 else "set_requires_gradient_sync",
        old="not used" if version == 1 else "True",
        new="used" if version == 1 else "False before the last micro-batch",
        how=no_sync.typed_for(job, sentence, typed),
        costs=f"Up to {'all gradients' if takes is None else byte_size(takes)} more memory per rank; "
        f"{job.free_in_words}.",
    )
    confidence = Confidence.LOW if job.free_bytes is None and job.on_devices else job.confidence()
    return no_sync.reduced_too_often(job, RULE, replayed, action, change, confidence)
