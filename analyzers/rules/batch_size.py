"""A larger batch, or accumulation: says what communication would cost were it shared by twice the batches.

Gradients are reduced once an optimizer step, whatever the batch: with twice the samples each pays half. That changes
the training (fewer, larger steps), so it is information and no part of a plan. Where memory is free the batch itself
can grow, which fills the device better as well; where it is not, gradients can be accumulated.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.frameworks import framework
from perfscope.analyzers.rules.traffic import gib, replayed, room_bytes, sure
from perfscope.findings import Action, Evidence, Finding, Obtained, Severity

RULE: Final = "batch-size"
SHARE: Final = 0.10
"""Share of the step that must be saved, and be exposed transfer, by twice the batch."""
FREE: Final = 0.5
"""Share of a device's memory that must be free for twice the batch; what is held besides activations does not grow."""


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: communication hides, or gradients are not all-reduced once a batch."""
    exposed_us = facts.typical_us("exposed_comm_transfer")
    if "ddp" not in facts.strategies or exposed_us < SHARE * facts.step_time_us:
        return None
    change = {"batch.accumulation": "2"}
    found = replayed(facts, change, SHARE)
    if found is None:
        return None
    prediction, saved_us = found
    room, capacity = room_bytes(facts), min((row.capacity_bytes or 0 for row in facts.memory), default=0)
    grows = room is not None and capacity > 0 and room >= FREE * capacity
    evidence = [
        Evidence(
            what="exposed communication transfer per step (median)", value=exposed_us, unit="us", ranks=facts.ranks
        ),
        Evidence(what="time of a batch saved, by replay", value=saved_us, unit="us", ranks=facts.ranks),
    ]
    if room is not None:
        evidence.append(Evidence(what="memory free on the fullest rank", value=room, unit="bytes"))
    old = _batch_size(facts) if grows else str(max(facts.microbatches, 1))
    new = None if old is None else str(2 * int(old))
    return Finding(
        rule=RULE,
        title=f"Communication is paid for each batch: with twice the batch a step a sample would take "
        f"{saved_us / facts.step_time_us:.0%} less",
        severity=Severity.INFO,
        evidence=tuple(evidence),
        action=Action(
            setting="batch size per rank" if grows else "batches accumulated per optimizer step",
            old=old,
            new=new,
            how=_how(facts, new, grows=grows),
            costs="Another training: half as many optimizer steps an epoch, of twice the batch; the learning rate and "
            "its schedule must be tuned again."
            + (f" Memory for twice the activations; {gib(room or 0)} are free." if grows else ""),
        ),
        confidence=sure(facts),
        obtained=Obtained.REPLAYED,
        predicted_step_ns=prediction,
    )


def _batch_size(facts: JobFacts) -> str | None:
    """Of a rank's loader, or the first dimension of its batch."""
    for run in facts.runs.values():
        for loader in run.dataloaders[:1]:
            if loader.batch_size:
                return str(loader.batch_size)
        if run.batch_shape:
            return str(run.batch_shape[0])
    return None


def _how(facts: JobFacts, new: str | None, *, grows: bool) -> str:
    used = framework(facts)
    value = new or "twice as many"
    told = "The time shown is that of one recorded batch (perfscope whatif … --set batch.accumulation=2)."
    if grows:
        names = {
            "transformers": f"TrainingArguments(per_device_train_batch_size={value}).",
            "deepspeed": f'"train_micro_batch_size_per_gpu": {value}.',
            "megatron": "--micro-batch-size and --global-batch-size twice as large.",
        }
        return f"{names.get(used, f'DataLoader(dataset, batch_size={value}, …).')} {told}"
    names = {
        "transformers": f"TrainingArguments(gradient_accumulation_steps={value}).",
        "accelerate": f"Accelerator(gradient_accumulation_steps={value}), steps under accelerator.accumulate(model).",
        "lightning": f"Trainer(accumulate_grad_batches={value}).",
        "deepspeed": f'"gradient_accumulation_steps": {value}.',
        "megatron": "--global-batch-size twice as large at the same --micro-batch-size.",
    }
    plain = f"{value} batches for each optimizer.step(), all but the last under `with model.no_sync():`."
    return f"{names.get(used, plain)} {told}"
