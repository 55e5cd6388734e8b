"""More micro-batches, or interleaved stages: fires when a pipeline's inherent bubble is large.

With p stages, m micro-batches and v chunks of the model per stage, (p-1)/(v·m + p-1) of the step is bubble, however
even the stages are (Narayanan et al., SC'21). The gain is replayed for schedules that can be written down for another
count, at the same batch; for others it is the formula's, for micro-batches that are smaller in proportion and still
fill the device: a bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from perfscope.analyzers.job.pipelines.table import ideal_bubble_share, inherent_bubble_share
from perfscope.analyzers.rules.context import OF_BOUND, RuleContext
from perfscope.analyzers.rules.typed import call, in_deepspeed
from perfscope.frozen import dataclass
from perfscope.results.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, code
from perfscope.results.tables import Pipeline

RULE: Final = "pipeline-bubble"
SHARE: Final = 0.10
"""Least share of the step of a large bubble, where the gain is bounded only; more micro-batches should reduce it to
that."""
GAIN: Final = 0.03
"""Least share of the step that the replay must save."""
MOST_TIMES: Final = 4
"""At most this many times as many micro-batches are advised: each gets as many times smaller, or the batch larger."""
ALIKE: Final = 0.02
"""Step times closer than this are equal within noise."""
FILLED: Final = 0.8
"""Of the inherent bubble, below which something fills it, as halves of backwards do: what is left is not inherent."""
BEYOND: Final = 0.02
"""Share of the step by which a bubble must exceed the inherent one for both to be named."""


@dataclass(frozen=True)
class _Size:
    """p stages, m micro-batches, v chunks per stage."""

    stages: int
    microbatches: int
    chunks: int

    def share(self, *, microbatches: int | None = None, chunks: int | None = None) -> float:
        """The ideal bubble, with something changed."""
        return ideal_bubble_share(self.stages, microbatches or self.microbatches, chunks or self.chunks)

    def advised(self) -> int:
        """Micro-batches, doubled until the bubble is small or the limit is reached; twice as many at least."""
        count = 2 * self.microbatches
        while self.share(microbatches=count) > SHARE and 2 * count <= MOST_TIMES * self.microbatches:
            count *= 2
        return count


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no pipeline, micro-batches not known, or a small bubble."""
    pipeline = job.summary.pipeline
    size = _size(pipeline) if pipeline is not None else None
    if pipeline is None or size is None:
        return None
    inherent, most = inherent_bubble_share(pipeline), size.advised()
    replayed = _replayed(job, size, most)
    more, gain_us = replayed or (most, 0.0)
    # The rest of the step stays: T' (1 - b') = T (1 - b).
    saved_us = job.step_time_us * max(1 - (1 - inherent) / (1 - size.share(microbatches=more)), 0.0)
    if job.share(gain_us) < GAIN if replayed is not None else inherent < SHARE:
        return None
    return Finding(
        rule=RULE,
        title=_title(pipeline, size),
        severity=Severity.of_share(job.share(saved_us * OF_BOUND if replayed is None else gain_us)),
        evidence=_evidence(pipeline, size),
        action=Action(
            setting="micro-batches per step",
            old=str(size.microbatches),
            new=str(more),
            how=_how(job, pipeline, size, more),
            costs="Smaller micro-batches fill the device less, and each adds p2p messages.",
        ),
        confidence=Confidence.LOW if job.info.few_steps or pipeline.bubbles_are_bounds else Confidence.MEDIUM,
        obtained=Obtained.BOUNDED,
        ceiling=job.ceiling(saved_us),
        # Replayed for schedules that can be generated for another count, at the same batch; nothing else can be asked.
        whatif={"pipeline.microbatches": str(more)} if replayed is not None else {},
    )


def _size(pipeline: Pipeline) -> _Size | None:
    """None where the ideal bubble is not known."""
    if pipeline.ideal_bubble_share is None or pipeline.degree is None or pipeline.microbatches is None:
        return None
    return _Size(pipeline.degree, pipeline.microbatches, pipeline.virtual_stages)


def _title(pipeline: Pipeline, size: _Size) -> str:
    share = inherent_bubble_share(pipeline)
    what = f"{size.stages} stages and {size.microbatches} micro-batches"
    if share < FILLED * (pipeline.ideal_bubble_share or 0.0):
        return f"The pipeline bubble takes {pipeline.bubble_share:.0%} of the step, with {what}"
    inherent = f"{share:.0%} is inherent" if pipeline.bubble_share - share >= BEYOND else "it is inherent"
    return f"The pipeline bubble takes {pipeline.bubble_share:.0%} of the step; {inherent} in {what}"


def _evidence(pipeline: Pipeline, size: _Size) -> tuple[Evidence, ...]:
    ranks = tuple(sorted(rank for row in pipeline.stages for rank in row.ranks))
    return (
        Evidence("bubble, mean over stages", pipeline.bubble_share, "share", ranks),
        Evidence("bubble of balanced stages, (p-1)/(v·m + p-1)", size.share(), "share"),
        Evidence("stages, p", float(size.stages)),
        Evidence("micro-batches per step, m", float(size.microbatches)),
        Evidence("chunks of the model per stage, v", float(size.chunks)),
    )


def _replayed(job: RuleContext, size: _Size, most: int) -> tuple[int, float] | None:
    """The fewest micro-batches whose replayed step is within noise of the best up to ``most``, and the µs of a step
    that they save; None where none can be replayed.

    Every p2p message takes time, which the formula leaves out.
    """
    steps_us: dict[int, float] = {}
    for count in (size.microbatches * times for times in (2, 3, 4)):
        change = {"pipeline.microbatches": str(count)}
        # Those that take longer than fewer ones are neither the best nor the fewest: their first replay shows it.
        shorter = 1 - min(steps_us.values(), default=math.inf) / job.step_time_us
        if count > most or job.predict is None or not job.could_save(change, shorter):
            continue
        if (step := job.predict(change)) is not None:
            steps_us[count] = step.mid
    if not steps_us:
        return None
    count = next(count for count, mid in steps_us.items() if mid <= (1 + ALIKE) * min(steps_us.values()))
    return count, job.step_time_us - steps_us[count]


_OF_SEVERAL_STAGES: Final = (
    "ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)  # fmt: skip
"""Schedules of torch that take a list of stages."""


def _of_megatron(settings: Mapping[str, Any], size: _Size, more: int) -> str:
    """Smaller micro-batches where their number divides them, else a larger batch."""
    micro, whole = settings.get("micro_batch_size"), settings.get("global_batch_size")
    if isinstance(micro, int) and micro * size.microbatches % more == 0:
        return code("shell", f"--micro-batch-size {micro * size.microbatches // more}") + "\n"
    if isinstance(whole, int) and whole * more % size.microbatches == 0:
        return code("shell", f"--global-batch-size {whole * more // size.microbatches}") + "\n"
    return f"--micro-batch-size or --global-batch-size, so that a step has {more} micro-batches. "


def _how(job: RuleContext, pipeline: Pipeline, size: _Size, more: int) -> str:
    """What to type, in the terms of the framework in use."""
    megatron, pipelined = job.settings("megatron"), job.settings("pipeline")
    chunks = 2 * size.chunks
    if "pipeline_model_parallel_size" in megatron:
        how = _of_megatron(megatron, size, more)
        interleave = "--num-layers-per-virtual-pipeline-stage with half the layers"
    elif pipelined.get("implementation") == "deepspeed":
        how = in_deepspeed(f'{{"gradient_accumulation_steps": {more}}}')
        how += '\nWith "train_micro_batch_size_per_gpu" smaller to match. '
        interleave = ""
    elif str(pipelined.get("schedule", "")).startswith("Schedule"):
        name = str(pipelined["schedule"])
        several = name in _OF_SEVERAL_STAGES
        imported = f"from torch.distributed.pipelining import {name}"
        how = call(f"schedule = {name}", "stages" if several else "stage", imported, n_microbatches=more) + "\n"
        interleave = f"ScheduleInterleaved1F1B with {chunks} stages per rank"
    else:
        how = (
            f"{more} micro-batches per step (Megatron-LM: --micro-batch-size or --global-batch-size; "
            f"torch.distributed.pipelining: n_microbatches={more}). "
        )
        interleave = f"{chunks} interleaved chunks per stage (Megatron-LM: --num-layers-per-virtual-pipeline-stage)"
    how += "Either each is smaller, as long as its kernels still fill the device, or the batch grows."
    if interleave and pipeline.schedule in ("1f1b", "interleaved"):
        how += f" At the same batch: {interleave} reduces the bubble to {size.share(chunks=chunks):.0%}, for twice the"
        how += " messages."
    return how
