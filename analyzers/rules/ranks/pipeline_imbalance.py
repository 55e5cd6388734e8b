"""A pipeline stage with more work than the others: all wait for it with every micro-batch.

Work is model FLOPs, else compute kernels. A stage that is slow with the same work is a straggler.
Language models' last stage often is the one: the projection to the vocabulary costs as much as several layers.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.whatif.stage_balance import uneven_stage, work_shares
from perfscope.results.findings import Action, Confidence, Evidence, Finding
from perfscope.results.tables import Pipeline, StageRow

RULE: Final = "pipeline-imbalance"
SHARE: Final = 0.02
"""Least share of the step that even stages save: less is noise."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no pipeline, even stages, stages missing from the recording, or nothing to be saved."""
    pipeline = job.summary.pipeline
    stage = uneven_stage(pipeline) if pipeline is not None else None
    if pipeline is None or stage is None:
        return None
    shares = work_shares(pipeline)
    assert shares is not None
    row = next(row for row in pipeline.stages if row.stage == stage)
    saved_us = _saved_us(job, pipeline, row)
    if saved_us < SHARE * job.step_time_us:
        return None
    return job.finding(
        RULE,
        f"Pipeline stage {stage} has {shares[stage]:.2f} times the work of the mean stage, and the others wait for it",
        saved_us,
        evidence=_evidence(pipeline, row, shares[stage]),
        action=Action(setting="layers of each stage", old=None, new=None, how=_how(job, pipeline, row)),
        confidence=Confidence.LOW if job.info.few_steps else Confidence.HIGH,
        predicted=job.balanced_step_us,
    )


def _saved_us(job: RuleContext, pipeline: Pipeline, row: StageRow) -> float:
    """Step time that even stages save: replayed, else at most what the stage works beyond the mean."""
    if job.balanced_step_us is not None:
        return job.step_time_us - job.balanced_step_us.mid
    return row.busy_us - sum(other.busy_us for other in pipeline.stages) / len(pipeline.stages)


def _evidence(pipeline: Pipeline, row: StageRow, share: float) -> tuple[Evidence, ...]:
    others = [other for other in pipeline.stages if other.stage != row.stage]
    ranks = tuple(sorted(rank for other in others for rank in other.ranks))
    rows = [Evidence("its work, over the mean stage's", share, "ratio", row.ranks)]
    if row.flops_per_step is not None:
        flops = [other.flops_per_step for other in others if other.flops_per_step is not None]
        rows.append(Evidence("model FLOPs per step", row.flops_per_step / 1e12, "TFLOP", row.ranks))
        if flops:
            rows.append(Evidence("the other stages' (mean)", sum(flops) / len(flops) / 1e12, "TFLOP", ranks))
    return (
        *rows,
        Evidence("its own time per step", row.busy_us, "us", row.ranks),
        Evidence("the other stages' (mean)", sum(o.busy_us for o in others) / len(others), "us", ranks),
        Evidence("bubble, mean over stages", pipeline.bubble_share, "share"),
    )


def _how(job: RuleContext, pipeline: Pipeline, row: StageRow) -> str:
    """What to type, in the terms of the framework in use."""
    megatron, pipelined = job.settings("megatron"), job.settings("pipeline")
    end = {0: "first", (pipeline.degree or 0) - 1: "last"}.get(row.stage)
    ends = f"--decoder-{end}-pipeline-num-layers with fewer layers" if end else "--pipeline-model-parallel-layout"
    of_megatron = (
        f"{ends}; for embedding and loss --account-for-{'embedding' if end == 'first' else 'loss'}-in-pipeline-split"
    )
    of_torch = "the split points of pipeline(…, split_spec=…), or the layers that each PipelineStage is built from"
    if "pipeline_model_parallel_size" in megatron:
        return f"Move layers from stage {row.stage} to the others: {of_megatron}."
    if pipelined.get("implementation") == "deepspeed":
        return (
            f'Move layers from stage {row.stage} to the others: PipelineModule(…, partition_method="parameters"), or '
            "layers of equal cost in the list that it is built from."
        )
    if str(pipelined.get("schedule", "")).startswith("Schedule"):
        return f"Move layers from stage {row.stage} to the others: {of_torch}."
    return (
        f"Move layers from stage {row.stage} to the others. Megatron-LM: {of_megatron}. torch.distributed.pipelining: "
        f"{of_torch}."
    )
