"""A larger batch, or accumulation: what communication costs when twice the samples share it.

Gradients are reduced once per optimizer step, whatever the batch: with twice the samples each pays half. That changes
the training (fewer, larger steps), so it is information and not part of a plan. Where memory is free the batch itself
can grow, which also fills the device better; elsewhere gradients can be accumulated.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.typed import call, data_loader, in_deepspeed, training_arguments
from perfscope.results.findings import Action, Evidence, Finding, Obtained, Severity, code
from perfscope.text import byte_size

RULE: Final = "batch-size"
SHARE: Final = 0.10
"""Least share of the step that is exposed transfer, and that twice the batch saves."""
FREE: Final = 0.5
"""Share of the device memory that must be free for twice the batch; only activations grow."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: communication is overlapped, or gradients are not all-reduced once per batch."""
    once_per_batch = "ddp" in job.info.strategies or job.reduced_by_unknown
    if not once_per_batch or job.exposed_transfer_us < SHARE * job.step_time_us:
        return None
    change = {"batch.accumulation": "2"}
    replayed = job.replayed(change, SHARE)
    if replayed is None:
        return None
    prediction, saved_us = replayed
    room, capacity = job.free_bytes, min((row.capacity_bytes or 0 for row in job.summary.memory), default=0)
    grows = room is not None and capacity > 0 and room >= FREE * capacity
    old = _batch_size(job) if grows else str(max(job.microbatches, 1))
    new = None if old is None else str(2 * int(old))
    return Finding(
        rule=RULE,
        title=f"With twice the batch per step, a sample takes {job.share(saved_us):.0%} less time{_why(job, saved_us)}",
        severity=Severity.INFO,
        evidence=(
            job.exposed_transfer(),
            Evidence("time saved per batch, replayed", saved_us, "us", job.ranks),
            *job.free_memory(),
        ),
        action=Action(
            setting="batch size per rank" if grows else "batches accumulated per optimizer step",
            old=old,
            new=new,
            how=_how(job, new, grows=grows),
            costs="A different training: half as many optimizer steps per epoch, of twice the batch. Tune the learning "
            "rate and its schedule again."
            + (f" Twice the memory for activations; {byte_size(room or 0)} are free." if grows else ""),
        ),
        confidence=job.confidence(),
        obtained=Obtained.REPLAYED,
        predicted_step_us=prediction,
    )


def _why(job: RuleContext, saved_us: float) -> str:
    """By fewer reductions, where those take as long; else what is done once per step is hidden behind the second half,
    which removing it saves as well.
    """
    return " (fewer reductions)" if job.exposed_transfer_us >= saved_us else ""


def _batch_size(job: RuleContext) -> str | None:
    """Batch size of a rank's loader, or the first dimension of its batch."""
    for run in job.runs.values():
        for loader in run.dataloaders[:1]:
            if loader.batch_size:
                return str(loader.batch_size)
        if run.batch_shape:
            return str(run.batch_shape[0])
    return None


def _how(job: RuleContext, new: str | None, *, grows: bool) -> str:
    used = job.framework
    basis = "The predicted time is that of one recorded batch (batch.accumulation=2 of perfscope whatif)."
    if used == "megatron":
        return f"{_of_megatron(job, grows=grows)}\n{basis}"
    if new is None:
        return f"Twice as many samples per {'batch' if grows else 'optimizer step'}. {basis}"
    if grows:
        names = {
            "transformers": training_arguments(per_device_train_batch_size=new),
            "deepspeed": in_deepspeed(f'{{"train_micro_batch_size_per_gpu": {new}}}'),
        }
        plain = data_loader(batch_size=new)
    else:
        names = {
            "transformers": training_arguments(gradient_accumulation_steps=new),
            "accelerate": "Steps under accelerator.accumulate(model), and:\n"
            + call("accelerator = Accelerator", gradient_accumulation_steps=new),
            "lightning": call("trainer = Trainer", accumulate_grad_batches=new),
            "fabric": code("python", _ACCUMULATED_FABRIC.format(count=new)),
            "deepspeed": in_deepspeed(f'{{"gradient_accumulation_steps": {new}}}'),
        }
        plain = code("python", _ACCUMULATED.format(count=new))
        plain = f"{_MAY_BE_DDP}\n{plain}" if job.reduced_by_unknown else plain
    return f"{names.get(used, plain)}\n{basis}"


_MAY_BE_DDP: Final = "With DistributedDataParallel as follows; a loop of your own reduces after the last batch only:"
_ACCUMULATED: Final = """\
from contextlib import nullcontext
for number, batch in enumerate(loader, 1):
    last = number % {count} == 0
    with nullcontext() if last else model.no_sync():
        (loss_of(model, batch) / {count}).backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()"""
"""What to type without a framework."""
_ACCUMULATED_FABRIC: Final = """\
for number, batch in enumerate(loader, 1):
    last = number % {count} == 0
    with fabric.no_backward_sync(model, enabled=not last):
        fabric.backward(loss_of(model, batch) / {count})
    if last:
        optimizer.step()
        optimizer.zero_grad()"""


def _of_megatron(job: RuleContext, *, grows: bool) -> str:
    settings = job.settings("megatron")
    sizes = {
        name: 2 * size
        for name in (("micro_batch_size", "global_batch_size") if grows else ("global_batch_size",))
        if isinstance(size := settings.get(name), int)
    }
    if len(sizes) == 1 + grows:
        return code("shell", " ".join(f"--{name.replace('_', '-')} {size}" for name, size in sizes.items()))
    return f"--global-batch-size {'and --micro-batch-size ' * grows}twice as large."
