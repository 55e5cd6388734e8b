"""Activation checkpointing: fires when forwards that run again in the backward take a share of the step, and memory is
free for what they save, or it is not known that none is.

A checkpointed block keeps its input alone, and computes the rest again when its backward comes (Chen et al., "Training
Deep Nets with Sublinear Memory Cost", arXiv 1604.06174). What keeping it would take follows from the recording: each
time a forward runs again, memory grows by what it keeps for the backward. All blocks but the one that is in its
backward would keep that at the peak.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.job.extra_work import ExtraCost
from perfscope.analyzers.rules.context import SPARE, RuleContext, known
from perfscope.analyzers.rules.typed import in_accelerate, training_arguments
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code
from perfscope.text import byte_size

RULE: Final = "activation-checkpointing"
SHARE: Final = 0.05
"""Least share of the step that is recomputation, and that leaving it out must save."""
SETTING: Final = "activations.recompute"


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: little is computed again, or memory has no room for one block more."""
    again = job.recomputation
    if again is None or again.us < SHARE * job.step_time_us or again.count < 1:
        return None
    takes, room = _takes(job, again), job.free_bytes
    share = 1.0 if takes is None or room is None else _fitting(again.count, takes, room)
    if share <= 0:
        return None
    change = {SETTING: f"{1 - share:.3g}"}
    prediction = job.predict(change) if job.predict is not None else None
    saved_us = share * again.us if prediction is None else job.step_time_us - prediction.mid
    if saved_us < SHARE * share * job.step_time_us:
        return None
    return job.finding(
        RULE,
        f"Activations are computed again in the backward: {job.share(again.us):.0%} of the step",
        saved_us,
        evidence=(
            Evidence("computing activations again, per step (median)", again.us, "us", job.ranks),
            Evidence("forwards that run again, per step", again.count, ranks=job.ranks),
            *known("memory that keeping all of them takes per rank", takes, "bytes"),
            *job.free_memory(),
        ),
        action=_action(job, again.count, share, takes),
        confidence=Confidence.LOW if may_not_fit(job) else job.confidence(),
        predicted=prediction,
        whatif=change,
    )


def may_not_fit(job: RuleContext) -> bool:
    """Is it not known whether memory has room for what is computed again? Most jobs that do that had none."""
    return job.recomputation is None or job.free_bytes is None or _takes(job, job.recomputation) is None


def _takes(job: RuleContext, again: ExtraCost) -> float | None:
    """Bytes more at the peak if nothing were computed again; None where memory is not recorded, or a pipeline has
    several micro-batches between their forward and backward.
    """
    if again.grown_bytes is None or "pipeline" in job.info.strategies:
        return None
    batches = max(job.microbatches, 1)
    of_batch, blocks = again.grown_bytes / batches, max(again.count / batches, 1.0)
    return of_batch * (1 - 1 / blocks)


def _fitting(count: float, takes: float, room: int) -> float:
    """The share of ``count`` forwards whose activations fit into the memory that is free."""
    if SPARE * takes <= room:
        return 1.0
    return int(count * room / (SPARE * takes)) / count


def _action(job: RuleContext, count: float, share: float, takes: float | None) -> Action:
    blocks = round(count / max(job.microbatches, 1))
    kept = round(share * blocks)
    more = "Memory for what the forward keeps" if takes is None else f"About {byte_size(share * takes)} more memory"
    setting, how = _whole(job) if share == 1.0 else ("blocks that are checkpointed", _part(job, blocks, kept))
    return Action(
        setting=setting,
        old="on" if share == 1.0 else str(blocks),
        new="off" if share == 1.0 else str(blocks - kept),
        how=how,
        costs=f"{more} per rank; {job.free_in_words}.",
    )


def _whole(job: RuleContext) -> tuple[str, str]:
    """The setting, and how to turn it off, as the framework in use writes it."""
    if job.framework == "transformers":
        return "TrainingArguments(gradient_checkpointing=…)", training_arguments(gradient_checkpointing=False)
    if job.framework == "megatron":
        return "--recompute-granularity", (
            "The command without --recompute-granularity full, --recompute-method and --recompute-num-layers. Or, for "
            "less memory, attention alone:\n" + code("shell", "--recompute-granularity selective")
        )
    if job.framework == "accelerate" and job.settings("fsdp"):
        return "fsdp_activation_checkpointing", in_accelerate("fsdp_config:\n  fsdp_activation_checkpointing: false")
    return "torch.utils.checkpoint.checkpoint", (
        "Call the blocks themselves, and leave out checkpoint_wrapper and apply_activation_checkpointing:\n"
        + code(
            "python", "for block in blocks:\n    x = block(x)  # in place of checkpoint(block, x, use_reentrant=False)"
        )
    )


def _part(job: RuleContext, blocks: int, kept: int) -> str:
    """How to turn it off for ``kept`` of the blocks."""
    if job.framework == "megatron":
        return "Whole layers, but not in all of them (per pipeline stage):\n" + code(
            "shell",
            f"--recompute-granularity full --recompute-method block --recompute-num-layers {blocks - kept}",
        )
    return f"There is memory for the activations of {kept} of the {blocks} blocks:\n" + code(
        "python",
        "from torch.utils.checkpoint import checkpoint\n"
        "for number, block in enumerate(blocks):\n"
        f"    x = block(x) if number < {kept} else checkpoint(block, x, use_reentrant=False)",
    )
