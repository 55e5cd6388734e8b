"""A pipeline stage that is given more to do than the others: all wait for it with every micro-batch.

Work is model FLOPs, else compute kernels. A stage that is slow for the same work is a straggler and not named here.
Language models' last stage often is the one: the projection to the vocabulary costs as much as several layers.
"""

from __future__ import annotations

from typing import Any, Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.pipelines.balance import uneven_stage, work_shares
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling
from perfscope.summary_tables import Pipeline, StageRow

RULE: Final = "pipeline-imbalance"
SHARE: Final = 0.02
"""Share of the step that even stages must save: less is not told from noise."""


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: no pipeline, even stages, stages missing from the recording, or nothing to be saved."""
    pipeline = facts.pipeline
    stage = uneven_stage(pipeline) if pipeline is not None else None
    if pipeline is None or stage is None:
        return None
    shares = work_shares(pipeline)
    assert shares is not None
    row = next(row for row in pipeline.stages if row.stage == stage)
    saved_us = _saved_us(facts, pipeline, row)
    if saved_us < SHARE * facts.step_time_us:
        return None
    return Finding(
        rule=RULE,
        title=f"Pipeline stage {stage} does {shares[stage]:.2f} times the work of the mean stage, and the others wait",
        severity=Severity.of_share(saved_us / facts.step_time_us),
        evidence=_evidence(pipeline, row, shares[stage]),
        action=Action(setting="layers of each stage", old=None, new=None, how=_how(facts, pipeline, row)),
        confidence=Confidence.LOW if facts.few_steps else Confidence.HIGH,
        obtained=Obtained.BOUNDED if facts.balanced_step_ns is None else Obtained.REPLAYED,
        ceiling=ceiling(facts.step_time_us, saved_us),
        predicted_step_ns=facts.balanced_step_ns,
    )


def _saved_us(facts: JobFacts, pipeline: Pipeline, row: StageRow) -> float:
    """Step time that even stages save: played, else no more than what the stage does beyond the mean."""
    if facts.balanced_step_ns is not None:
        return facts.step_time_us - facts.balanced_step_ns.mid / 1e3
    return row.busy_us - sum(other.busy_us for other in pipeline.stages) / len(pipeline.stages)


def _evidence(pipeline: Pipeline, row: StageRow, share: float) -> tuple[Evidence, ...]:
    others = [other for other in pipeline.stages if other.stage != row.stage]
    ranks = tuple(sorted(rank for other in others for rank in other.ranks))
    found = [Evidence(what="its work, over the mean stage's", value=share, unit="ratio", ranks=row.ranks)]
    if row.flops_per_step is not None:
        flops = [other.flops_per_step for other in others if other.flops_per_step is not None]
        found.append(
            Evidence(what="model FLOPs per step", value=row.flops_per_step / 1e12, unit="TFLOP", ranks=row.ranks)
        )
        if flops:
            found.append(
                Evidence(
                    what="the other stages' (mean)", value=sum(flops) / len(flops) / 1e12, unit="TFLOP", ranks=ranks
                )
            )
    return (
        *found,
        Evidence(what="its own time per step", value=row.busy_us, unit="us", ranks=row.ranks),
        Evidence(
            what="the other stages' (mean)", value=sum(o.busy_us for o in others) / len(others), unit="us", ranks=ranks
        ),
        Evidence(what="bubble, mean over stages", value=pipeline.bubble_share, unit="share"),
    )


def _how(facts: JobFacts, pipeline: Pipeline, row: StageRow) -> str:
    """What to type, in the terms of the framework in use."""
    settings: dict[str, Any] = next((run.settings for run in facts.runs.values() if run.settings), {})
    megatron, told = settings.get("megatron", {}), settings.get("pipeline", {})
    end = {0: "first", (pipeline.degree or 0) - 1: "last"}.get(row.stage)
    ends = f"--decoder-{end}-pipeline-num-layers with fewer layers" if end else "--pipeline-model-parallel-layout"
    of_megatron = (
        f"{ends}; for embedding and loss --account-for-{'embedding' if end == 'first' else 'loss'}-in-pipeline-split"
    )
    of_torch = "the split points of pipeline(…, split_spec=…), or the layers that each PipelineStage is built from"
    if "pipeline_model_parallel_size" in megatron:
        return f"Move layers from stage {row.stage} to the others: {of_megatron}."
    if told.get("implementation") == "deepspeed":
        return (
            f'Move layers from stage {row.stage} to the others: PipelineModule(…, partition_method="parameters"), or '
            "layers of like cost in the list that it is built from."
        )
    if str(told.get("schedule", "")).startswith("Schedule"):
        return f"Move layers from stage {row.stage} to the others: {of_torch}."
    return (
        f"Move layers from stage {row.stage} to the others. Megatron-LM: {of_megatron}. torch.distributed.pipelining: "
        f"{of_torch}."
    )
