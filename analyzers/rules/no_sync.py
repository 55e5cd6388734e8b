"""``no_sync()`` under gradient accumulation: fires when gradients are reduced after every micro-batch.

Only the sum over all micro-batches is needed, once a step: communication x (1 - 1/k) is for nothing (torch's
``DistributedDataParallel.no_sync``; PyTorch tuning guide).
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling

RULE: Final = "ddp-no-sync"
SHARE: Final = 0.05
"""Share of the step that must be saved."""

_HOW: Final = {
    "accelerate": "Wrap the step in `with accelerator.accumulate(model):` and give Accelerator("
    "gradient_accumulation_steps=k): it reduces after the last micro-batch only.",
    "lightning": "Give Trainer(accumulate_grad_batches=k) instead of accumulating by hand: it reduces after the last "
    "micro-batch only.",
    "": "Run all micro-batches but the last under `with model.no_sync():`, forward and backward both.",
}


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None where gradients are reduced once a step, or little would be saved."""
    if facts.predict is None or not facts.torch_ddp:
        return None
    setting = {"ddp.no_sync": "true"}
    prediction = facts.predict(setting)
    saved_us = facts.step_time_us - prediction.mid / 1e3 if prediction is not None else 0.0
    if prediction is None or saved_us < SHARE * facts.step_time_us:
        return None
    rounds = max(facts.microbatches, 2)
    return Finding(
        rule=RULE,
        title=f"Gradients are reduced after each of {rounds} micro-batches, where once a step would do",
        severity=Severity.of_share(saved_us / facts.step_time_us),
        evidence=(
            Evidence(what="micro-batches per step", value=rounds, unit="", ranks=facts.ranks),
            Evidence(what="step time saved, by replay", value=saved_us, unit="us", ranks=facts.ranks),
            Evidence(
                what="exposed communication per step (mean)",
                value=sum(r.exposed_comm_transfer_us + r.exposed_comm_wait_us for r in facts.accounting)
                / len(facts.accounting),
                unit="us",
                ranks=facts.ranks,
            ),
        ),
        action=Action(setting="DistributedDataParallel.no_sync()", old="not used", new="used", how=_how(facts)),
        confidence=Confidence.LOW if facts.few_steps or facts.missing_ranks else Confidence.HIGH,
        obtained=Obtained.REPLAYED,
        ceiling=ceiling(facts.step_time_us, saved_us),
        predicted_step_ns=prediction,
        whatif=setting,
    )


def _how(facts: JobFacts) -> str:
    used = {name for run in facts.runs.values() for name in run.settings}
    return next((text for name, text in _HOW.items() if name in used), _HOW[""])
