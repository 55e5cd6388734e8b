"""``no_sync()`` under gradient accumulation: fires when gradients are reduced after every micro-batch.

Only the sum over all micro-batches is needed, once per step: communication x (1 - 1/k) is wasted (torch's
``DistributedDataParallel.no_sync``; PyTorch tuning guide).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from perfscope.analyzers.rules.context import TORCH, RuleContext
from perfscope.results.findings import Action, Confidence, Evidence, Finding, Prediction, code

RULE: Final = "ddp-no-sync"
SHARE: Final = 0.05
"""Share of the step that must be saved."""

HOW: Final = {
    "fabric": (
        "Fabric reduces in every backward that is not under its no_backward_sync:",
        (
            "for number, batch in enumerate(batches, 1):\n"
            "    with fabric.no_backward_sync(model, enabled=number < {rounds}):\n"
            "        fabric.backward(loss_of(model, batch) / {rounds})"
        ),
    ),
    "accelerate": (
        "Accelerate reduces after the last of the micro-batches only if it does the accumulation itself:",
        (
            "accelerator = Accelerator(gradient_accumulation_steps={rounds})\n"
            "for batch in loader:\n"
            "    with accelerator.accumulate(model):\n"
            "        ...  # forward, backward, optimizer.step() and zero_grad(), without conditions"
        ),
    ),
    "lightning": (
        "Lightning reduces after the last of the micro-batches only if it does the accumulation itself:",
        "trainer = Trainer(accumulate_grad_batches={rounds})  # your other arguments stay",
    ),
    "transformers": (
        "The Trainer reduces after the last of the micro-batches only if it does the accumulation itself:",
        "args = TrainingArguments(output_dir, gradient_accumulation_steps={rounds})  # your other arguments stay",
    ),
    TORCH: (
        "Run all micro-batches but the last under no_sync(), both forward and backward:",
        (
            "from contextlib import nullcontext\n"
            "for number, batch in enumerate(batches, 1):\n"
            "    with nullcontext() if number == len(batches) else model.no_sync():\n"
            "        loss_of(model, batch).backward()"
        ),
    ),
}
"""Framework -> (what to do, in code)."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None where gradients are reduced once per step, or little would be saved."""
    change = {"ddp.no_sync": "true"}
    replayed = job.replayed(change, SHARE) if job.torch_ddp and job.steps else None
    if replayed is None:
        return None
    sentence, typed = HOW.get(job.framework, HOW[TORCH])
    action = Action(
        setting="DistributedDataParallel.no_sync()", old="not used", new="used", how=typed_for(job, sentence, typed)
    )
    return reduced_too_often(job, RULE, replayed, action, change, job.confidence(Confidence.HIGH))


def rounds(job: RuleContext) -> int:
    """Micro-batches per step: at least two, where gradients are reduced more than once."""
    return max(job.microbatches, 2)


def typed_for(job: RuleContext, sentence: str, typed: str) -> str:
    """What to do, with the code that does it."""
    return f"{sentence}\n{code('python', typed.format(rounds=rounds(job)))}"


def reduced_too_often(
    job: RuleContext,
    rule: str,
    replayed: tuple[Prediction, float],
    action: Action,
    change: Mapping[str, str],
    confidence: Confidence,
) -> Finding:
    """The finding that gradients are reduced after each micro-batch; ``replayed``: as ``RuleContext.replayed``."""
    prediction, saved_us = replayed
    rows = job.summary.time_breakdown
    exposed_us = sum(row.exposed_comm_transfer_us + row.exposed_comm_wait_us for row in rows) / len(rows)
    return job.finding(
        rule,
        f"Gradients are reduced after each of {rounds(job)} micro-batches; once per step is enough",
        saved_us,
        evidence=(
            Evidence("micro-batches per step", rounds(job), ranks=job.ranks),
            Evidence("step time saved, replayed", saved_us, "us", job.ranks),
            Evidence("exposed communication per step (mean)", exposed_us, "us", job.ranks),
        ),
        action=action,
        confidence=confidence,
        predicted=prediction,
        whatif=change,
    )
