"""More micro-batches, or interleaved stages: fires when a pipeline's inherent bubble takes a considerable share.

With p stages, m micro-batches and v chunks of the model a stage, (p-1)/(v·m + p-1) of the step is bubble however even
the stages are (Narayanan et al., SC'21). That is a price and no defect, so it is no more than information. The gain is
the formula's for as many micro-batches of the same size in proportion: smaller ones may fill the device less.
"""

from __future__ import annotations

from typing import Any, Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.pipeline import ideal_bubble_share, inherent_bubble_share
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling
from perfscope.summary_tables import Pipeline

RULE: Final = "pipeline-bubble"
SHARE: Final = 0.10
"""Share of the step from which a bubble is considerable, and to which more micro-batches should bring it."""
MOST_TIMES: Final = 4
"""No more than this many times as many micro-batches are advised: their size goes down with it, or the batch goes up."""


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: no pipeline, micro-batches not known, or a small bubble."""
    pipeline = facts.pipeline
    if pipeline is None or pipeline.ideal_bubble_share is None or pipeline.microbatches is None:
        return None
    inherent = inherent_bubble_share(pipeline)
    more = _advised(pipeline)
    if inherent < SHARE or more == pipeline.microbatches:
        return None
    assert pipeline.degree is not None
    after = ideal_bubble_share(pipeline.degree, more, pipeline.virtual_stages)
    # The rest of the step stays: T' (1 - b') = T (1 - b).
    saved_us = facts.step_time_us * (1 - (1 - inherent) / (1 - after))
    return Finding(
        rule=RULE,
        title=_title(pipeline),
        severity=Severity.INFO,
        evidence=_evidence(facts, pipeline),
        action=Action(
            setting="micro-batches per step",
            old=str(pipeline.microbatches),
            new=str(more),
            how=_how(facts, pipeline, more),
        ),
        confidence=Confidence.LOW if facts.few_steps or pipeline.bubbles_are_bounds else Confidence.MEDIUM,
        obtained=Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, saved_us) if saved_us > 0 else None,
    )


def _title(pipeline: Pipeline) -> str:
    size = f"{pipeline.degree} stages and {pipeline.microbatches} micro-batches"
    beyond = pipeline.bubble_share - inherent_bubble_share(pipeline)
    why = f"{inherent_bubble_share(pipeline):.0%} of it inherent in" if beyond >= 0.02 else "the price of"
    return f"The pipeline's bubble takes {pipeline.bubble_share:.0%} of the step, {why} {size}"


def _advised(pipeline: Pipeline) -> int:
    """Micro-batches, doubled until the bubble is small or there are too many."""
    assert pipeline.microbatches is not None and pipeline.degree is not None
    count = pipeline.microbatches
    while (
        ideal_bubble_share(pipeline.degree, count, pipeline.virtual_stages) > SHARE
        and 2 * count <= MOST_TIMES * pipeline.microbatches
    ):
        count *= 2
    return count


def _evidence(facts: JobFacts, pipeline: Pipeline) -> tuple[Evidence, ...]:
    ranks = tuple(sorted(rank for row in pipeline.stages for rank in row.ranks))
    entries = [
        Evidence(what="bubble, mean over stages", value=pipeline.bubble_share, unit="share", ranks=ranks),
        Evidence(
            what="bubble of even stages, (p-1)/(v·m + p-1)", value=pipeline.ideal_bubble_share or 0.0, unit="share"
        ),
        Evidence(what="stages, p", value=float(pipeline.degree or 0), unit=""),
        Evidence(what="micro-batches per step, m", value=float(pipeline.microbatches or 0), unit=""),
        Evidence(what="chunks of the model per stage, v", value=float(pipeline.virtual_stages), unit=""),
    ]
    return tuple(entries)


def _how(facts: JobFacts, pipeline: Pipeline, more: int) -> str:
    """What to type, in the terms of the framework in use."""
    settings: dict[str, Any] = next((run.settings for run in facts.runs.values() if run.settings), {})
    megatron, told = settings.get("megatron", {}), settings.get("pipeline", {})
    chunks = 2 * pipeline.virtual_stages
    if "pipeline_model_parallel_size" in megatron:
        how = f"--micro-batch-size or --global-batch-size, so that a step has {more} micro-batches"
        interleave = "--num-layers-per-virtual-pipeline-stage with half the layers of a stage"
    elif told.get("implementation") == "deepspeed":
        how = f'"gradient_accumulation_steps": {more}, with "train_micro_batch_size_per_gpu" smaller to match'
        interleave = ""
    elif str(told.get("schedule", "")).startswith("Schedule"):
        how = f"{told['schedule']}(…, n_microbatches={more})"
        interleave = f"ScheduleInterleaved1F1B with {chunks} stages a rank"
    else:
        how = (
            f"{more} micro-batches a step (Megatron-LM: --micro-batch-size or --global-batch-size; "
            f"torch.distributed.pipelining: n_microbatches={more})"
        )
        interleave = "interleaved stages (Megatron-LM: --num-layers-per-virtual-pipeline-stage)"
    how += ". Either each is smaller, as long as its kernels still fill the device, or the batch grows."
    if interleave and pipeline.schedule in ("1f1b", "interleaved"):
        halved = ideal_bubble_share(pipeline.degree or 1, pipeline.microbatches or 1, chunks)
        how += f" At the same batch: {interleave} brings the bubble to {halved:.0%}, for twice the messages."
    return how
