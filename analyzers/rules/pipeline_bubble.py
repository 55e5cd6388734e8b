"""More micro-batches, or interleaved stages: fires when a pipeline's inherent bubble takes a considerable share.

With p stages, m micro-batches and v chunks of the model a stage, (p-1)/(v·m + p-1) of the step is bubble however even
the stages are (Narayanan et al., SC'21). That is a price and no defect, so it is no more than information. The gain is
the formula's, for more micro-batches that are smaller in proportion and still fill the device as well: a bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.pipelines.table import ideal_bubble_share, inherent_bubble_share
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling
from perfscope.summary_tables import Pipeline

RULE: Final = "pipeline-bubble"
SHARE: Final = 0.10
"""Share of the step from which a bubble is considerable, and to which more micro-batches should bring it."""
MOST_TIMES: Final = 4
"""At most so many times as many micro-batches are advised: they get smaller by as much, or the batch larger."""
ALIKE: Final = 0.02
"""Step times closer than this are the same: noise."""
BEYOND: Final = 0.02
"""Share of the step by which a bubble exceeds the inherent one from which the two are told apart."""


@dataclass(frozen=True)
class _Size:
    """p stages, m micro-batches, v chunks a stage."""

    stages: int
    microbatches: int
    chunks: int

    def share(self, *, microbatches: int | None = None, chunks: int | None = None) -> float:
        """The ideal bubble, with something changed."""
        return ideal_bubble_share(self.stages, microbatches or self.microbatches, chunks or self.chunks)

    def advised(self) -> int:
        """Micro-batches, doubled until the bubble is small or there are too many."""
        count = self.microbatches
        while self.share(microbatches=count) > SHARE and 2 * count <= MOST_TIMES * self.microbatches:
            count *= 2
        return count


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: no pipeline, micro-batches not known, or a small bubble."""
    pipeline = facts.pipeline
    size = _size(pipeline) if pipeline is not None else None
    if pipeline is None or size is None:
        return None
    inherent, more = inherent_bubble_share(pipeline), size.advised()
    if inherent < SHARE or more == size.microbatches:
        return None
    more = _enough(facts, size, more)
    # The rest of the step stays: T' (1 - b') = T (1 - b).
    saved_us = facts.step_time_us * (1 - (1 - inherent) / (1 - size.share(microbatches=more)))
    return Finding(
        rule=RULE,
        title=_title(pipeline, size),
        severity=Severity.INFO,
        evidence=_evidence(pipeline, size),
        action=Action(
            setting="micro-batches per step",
            old=str(size.microbatches),
            new=str(more),
            how=_how(facts, pipeline, size, more),
            costs="Smaller micro-batches fill the device less well, and each is one more exchange of messages.",
        ),
        confidence=Confidence.LOW if facts.few_steps or pipeline.bubbles_are_bounds else Confidence.MEDIUM,
        obtained=Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, saved_us) if saved_us > 0 else None,
        # Replayed for schedules that can be written down anew, at the same batch.
        whatif={"pipeline.microbatches": str(more)},
    )


def _size(pipeline: Pipeline) -> _Size | None:
    """None where the ideal bubble is not known."""
    if pipeline.ideal_bubble_share is None or pipeline.degree is None or pipeline.microbatches is None:
        return None
    return _Size(pipeline.degree, pipeline.microbatches, pipeline.virtual_stages)


def _title(pipeline: Pipeline, size: _Size) -> str:
    inherent = inherent_bubble_share(pipeline)
    why = f"{inherent:.0%} of it inherent in" if pipeline.bubble_share - inherent >= BEYOND else "the price of"
    what = f"{size.stages} stages and {size.microbatches} micro-batches"
    return f"The pipeline's bubble takes {pipeline.bubble_share:.0%} of the step, {why} {what}"


def _evidence(pipeline: Pipeline, size: _Size) -> tuple[Evidence, ...]:
    ranks = tuple(sorted(rank for row in pipeline.stages for rank in row.ranks))
    return (
        Evidence(what="bubble, mean over stages", value=pipeline.bubble_share, unit="share", ranks=ranks),
        Evidence(what="bubble of even stages, (p-1)/(v·m + p-1)", value=size.share(), unit="share"),
        Evidence(what="stages, p", value=float(size.stages), unit=""),
        Evidence(what="micro-batches per step, m", value=float(size.microbatches), unit=""),
        Evidence(what="chunks of the model per stage, v", value=float(size.chunks), unit=""),
    )


def _enough(facts: JobFacts, size: _Size, most: int) -> int:
    """The fewest micro-batches that replay about as well as any up to ``most``; those where nothing can be replayed.

    Every exchange of messages has its price, which the formula leaves out.
    """
    counts = [size.microbatches * times for times in (2, 3, 4) if size.microbatches * times <= most]
    played = {
        count: found.mid
        for count in counts
        if facts.predict is not None and (found := facts.predict({"pipeline.microbatches": str(count)})) is not None
    }
    if not played:
        return most
    return next(count for count, mid in played.items() if mid <= (1 + ALIKE) * min(played.values()))


def _how(facts: JobFacts, pipeline: Pipeline, size: _Size, more: int) -> str:
    """What to type, in the terms of the framework in use."""
    settings: dict[str, Any] = next((run.settings for run in facts.runs.values() if run.settings), {})
    megatron, told = settings.get("megatron", {}), settings.get("pipeline", {})
    chunks = 2 * size.chunks
    if "pipeline_model_parallel_size" in megatron:
        how = f"--micro-batch-size or --global-batch-size, so that a step has {more} micro-batches"
        interleave = "--num-layers-per-virtual-pipeline-stage with half the layers"
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
        interleave = f"{chunks} interleaved chunks a stage (Megatron-LM: --num-layers-per-virtual-pipeline-stage)"
    how += ". Either each is smaller, as long as its kernels still fill the device, or the batch grows."
    if interleave and pipeline.schedule in ("1f1b", "interleaved"):
        how += f" At the same batch: {interleave} brings the bubble to {size.share(chunks=chunks):.0%}, for twice the"
        how += " messages."
    return how
