"""Rules: results in, findings out; one rule per module, which reads no traces.

In: a ``RuleContext`` (``context``), the summary so far and what the recording holds beyond it. Each rule's ``evaluate``
returns a ``Finding`` or None. Here, ``evaluate`` asks all of them, replays the changes that can be replayed, lowers the
confidence where the recording requires that, and sorts by worth; ``unprofiled`` predicts the same without the profiler;
``joint_plan`` replays the changes together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from perfscope.analyzers.defects import Defects
from perfscope.analyzers.rules.communication import (
    bucket_view,
    ddp_buckets,
    ddp_buffers,
    deepspeed_buckets,
    fsdp_no_sync,
    fsdp_prefetch,
    fsdp_reduce_dtype,
    gradient_compression,
    gradients_by_hand,
    host_backend,
    late_gradients,
    loop_collectives,
    megatron_overlap,
    nccl_environment,
    no_sync,
    sharded_overlap,
    slow_transfers,
    sync_batch_norm,
    tensor_parallel_span,
    unused_parameters,
)
from perfscope.analyzers.rules.compute import (
    batch_size,
    channels_last,
    costly_operator,
    double_precision,
    filled_tensors,
    loop_work,
    mixed_precision,
)
from perfscope.analyzers.rules.context import OF_BOUND
from perfscope.analyzers.rules.context import RuleContext as RuleContext
from perfscope.analyzers.rules.host import (
    checkpoint_saving,
    cpu_contention,
    cpu_oversubscription,
    debug_settings,
    garbage_collection,
    host_syncs,
    launch_bound,
    optimizer_kernels,
    recompilation,
    small_operators,
)
from perfscope.analyzers.rules.loading import dataloader_workers, loader_startup, sampler, slow_sampler
from perfscope.analyzers.rules.memory import (
    batch_copies,
    fragmentation,
    memory_growth,
    memory_limit,
    offload,
    out_of_memory,
    pinned_memory,
    recomputation,
    sharding_stage,
)
from perfscope.analyzers.rules.ranks import (
    cpu_times,
    host_pauses,
    imbalanced_work,
    pipeline_bubble,
    pipeline_imbalance,
    straggling_rank,
)
from perfscope.results.findings import STRAGGLING_RANK, Confidence, Finding, Obtained, Predict, Prediction, Severity
from perfscope.results.rows import Plan, StragglerRow

Rule = Callable[[RuleContext], Finding | None]

OF_SNAPSHOTS: Final[tuple[Rule, ...]] = (out_of_memory.evaluate, memory_growth.evaluate, fragmentation.evaluate)
"""Rules that need memory snapshots, and no trace."""

RULES: Final[tuple[Rule, ...]] = (
    *OF_SNAPSHOTS,
    batch_copies.evaluate,
    batch_size.evaluate,
    bucket_view.evaluate,
    channels_last.evaluate,
    checkpoint_saving.evaluate,
    costly_operator.evaluate,
    cpu_contention.evaluate,
    cpu_oversubscription.evaluate,
    cpu_times.evaluate,
    dataloader_workers.evaluate,
    ddp_buckets.evaluate,
    ddp_buffers.evaluate,
    debug_settings.evaluate,
    deepspeed_buckets.evaluate,
    double_precision.evaluate,
    filled_tensors.evaluate,
    fsdp_no_sync.evaluate,
    fsdp_prefetch.evaluate,
    fsdp_reduce_dtype.evaluate,
    garbage_collection.evaluate,
    gradient_compression.evaluate,
    gradients_by_hand.evaluate,
    host_backend.evaluate,
    host_pauses.evaluate,
    host_syncs.evaluate,
    imbalanced_work.evaluate,
    late_gradients.evaluate,
    launch_bound.evaluate,
    loader_startup.evaluate,
    loop_collectives.evaluate,
    loop_work.evaluate,
    megatron_overlap.evaluate,
    memory_limit.evaluate,
    mixed_precision.evaluate,
    nccl_environment.evaluate,
    no_sync.evaluate,
    offload.evaluate,
    optimizer_kernels.evaluate,
    pinned_memory.evaluate,
    pipeline_bubble.evaluate,
    pipeline_imbalance.evaluate,
    recompilation.evaluate,
    recomputation.evaluate,
    sampler.evaluate,
    sharded_overlap.evaluate,
    sharding_stage.evaluate,
    slow_sampler.evaluate,
    slow_transfers.evaluate,
    small_operators.evaluate,
    straggling_rank.evaluate,
    sync_batch_norm.evaluate,
    tensor_parallel_span.evaluate,
    unused_parameters.evaluate,
)

_SAME: Final = 0.05
"""Relative difference up to which the prediction of a finding is that of the replay."""

_LEAST_GAIN: Final = 0.005
"""By how much a change must be predicted to make the step faster: less reads as ``1x``."""

PERTURBED: Final = 1.25
"""Profiled over unprofiled step time from which profiling changes what is measured: no finding has high confidence;
from twice as much all have low."""

_LESS_SURE: Final = 0.03
"""By which share each step down in confidence lowers what findings are sorted by."""

_AS_LONG_UNPROFILED: Final = frozenset({
    checkpoint_saving.RULE, dataloader_workers.RULE, filled_tensors.RULE, garbage_collection.RULE, host_pauses.RULE,
    loader_startup.RULE, loop_work.RULE, slow_sampler.RULE,
})  # fmt: skip
"""Rules about time that may take as long without the profiler: Python and large operators, beside what events cost."""

_OF_LOOP: Final = frozenset({
    checkpoint_saving.RULE, double_precision.RULE, filled_tensors.RULE, garbage_collection.RULE, gradients_by_hand.RULE,
    host_pauses.RULE, small_operators.RULE,
})  # fmt: skip
"""Rules about what a training loop may do beside the training, or for it by hand."""

_MOST_LOST: Final = 0.75
"""Share of an unprofiled step that is lost at most: more of it is the profiler's doing."""

_REASONS_TO_WAIT: Final = (STRAGGLING_RANK, dataloader_workers.RULE, loader_startup.RULE, slow_sampler.RULE)
"""Rules about what a host that waits for its device cannot run ahead of."""

_MOST_OF_WAITS: Final = 0.8
"""Of what steps without waits of hosts save, from which these come behind the reason for them."""

_SEVERE: Final = (Severity.INFO, Severity.LOW, Severity.MEDIUM, Severity.HIGH)

_SURENESS: Final = (Confidence.LOW, Confidence.MEDIUM, Confidence.HIGH)


def evaluate(job: RuleContext, defects: Defects | None = None) -> tuple[Finding, ...]:
    """Every finding of every rule, the one that is worth most first, and of nearly equals the surest; what is no defect
    of the job's comes last. Rules that fail are left to ``defects``.
    """
    defects = defects or Defects()
    asked = (defects.attempt(f"What {_name_of(rule)} advises", partial(_asked, rule, job), None) for rule in RULES)
    found = _told_once([finding for finding in asked if finding is not None], job)
    findings = [
        replace(finding, confidence=_confidence(finding, job, job.step_time_us))
        for finding in _that_gain(found, job.step_time_us)
    ]
    worth = {finding.rule: _worth_for_sure(finding, job) for finding in findings}
    reason = max(worth.get(rule, 0.0) for rule in _REASONS_TO_WAIT)
    return tuple(sorted(findings, key=lambda finding: _order(finding, worth[finding.rule], reason)))


def _order(finding: Finding, worth: float, reason: float) -> tuple[bool, float, bool]:
    """What is no defect last, what is worth most first. Waits of hosts for devices come behind what is worth nearly as
    much by itself, ``reason``: hosts that wait for nothing hide it as far as they run ahead, and it stays.
    """
    waits = finding.rule == host_syncs.RULE
    counts = min(worth, reason) if waits and reason >= _MOST_OF_WAITS * worth else worth
    return finding.severity is Severity.INFO, -counts, waits


def _told_once(findings: list[Finding], job: RuleContext) -> tuple[Finding, ...]:
    """Without that about work of the loop where another says more of most of it."""
    others = [finding for finding in findings if finding.rule in _OF_LOOP]
    return tuple(
        finding
        for finding in findings
        if finding.rule != loop_work.RULE or not loop_work.is_told(finding, others, job.step_time_us)
    )


def _asked(rule: Rule, job: RuleContext) -> Finding | None:
    finding = rule(job)
    return None if finding is None else _replayed(finding, job)


def _name_of(rule: Rule) -> str:
    return rule.__module__.rpartition(".")[2].replace("_", "-")


def _that_gain(findings: tuple[Finding, ...], step_us: float) -> tuple[Finding, ...]:
    """Without those whose change is predicted to make the step no faster: that is no advice, whatever else is true."""
    return tuple(
        finding
        for finding in findings
        if finding.predicted_step_us is None or step_us >= (1 + _LEAST_GAIN) * finding.predicted_step_us.mid
    )


def of_snapshots(job: RuleContext) -> tuple[Finding, ...]:
    """The findings of a job whose memory snapshots alone are known, the most urgent first."""
    return tuple(finding for rule in OF_SNAPSHOTS if (finding := rule(job)) is not None)


def _worth(finding: Finding, step_time_us: float) -> float:
    """The share of the step that the change is expected to save: what was predicted, half of what is only a bound."""
    gain = finding.gain(step_time_us) or 0.0
    share = gain / (1 + gain) if math.isfinite(gain) else 1.0
    bounded = finding.predicted_step_us is None and finding.obtained is Obtained.BOUNDED
    return share * OF_BOUND if bounded else share


def _worth_for_sure(finding: Finding, job: RuleContext) -> float:
    """What findings are sorted by: of two changes that save as much, a surer one has fewer conditions and costs. What
    may not fit into memory counts as a bound. What other programs on the machine cost, or may have cost while it was
    recorded, counts half once more: a cause in the job itself remains when they are gone.
    """
    worth = _worth(finding, job.step_time_us)
    if finding.rule == recomputation.RULE and recomputation.may_not_fit(job):
        worth *= OF_BOUND
    if finding.rule == cpu_contention.RULE or (finding.rule == STRAGGLING_RANK and straggling_rank.is_in_doubt(job)):
        worth *= OF_BOUND
    return worth * (1 - _LESS_SURE * (2 - _SURENESS.index(finding.confidence)))


def unprofiled(findings: tuple[Finding, ...], job: RuleContext) -> tuple[Finding, ...]:
    """The findings with predictions of the step without the profiler, where that is known: that is the step that the
    job takes. Rules compare times that were recorded, and so predict the recorded step. A finding that gains nothing
    there is none.
    """
    if job.info.unprofiled_step_us is None:
        return findings
    return _that_gain(tuple(_unprofiled(finding, job) for finding in findings), job.info.step_us)


def _unprofiled(finding: Finding, job: RuleContext) -> Finding:
    if finding.predicted_step_us is None:
        return _bound_unprofiled(finding, job)
    without, replayed = job.without_profiler(finding.predicted_step_us, finding.whatif)
    whatif = finding.whatif if replayed else {}
    ceiling = None if finding.ceiling is None else max(finding.ceiling, job.info.step_us / without.mid - 1)
    shown = replace(finding, predicted_step_us=without, ceiling=ceiling, whatif=whatif)
    return replace(shown, confidence=_confidence(shown, job, job.info.step_us))


def _bound_unprofiled(finding: Finding, job: RuleContext) -> Finding:
    """With the bound that what is lost leaves of an unprofiled step, where the profiler makes that no longer: then it
    is a larger share of that step. The bound stays where that is most of the step.

    Example: a collator takes 41 ms of a recorded step of 312, which takes 207 without the profiler: at most 1.25x.
    """
    ceiling = finding.ceiling
    if finding.rule not in _AS_LONG_UNPROFILED or ceiling is None or not math.isfinite(ceiling):
        return finding
    lost_us, step_us = job.step_time_us * ceiling / (1 + ceiling), job.info.step_us
    if finding.rule == loop_work.RULE:
        # Of small operators some of it is the profiler's: between all of it, and the same share of both steps.
        lost_us *= math.sqrt(min(step_us / job.step_time_us, 1.0))
    if lost_us > _MOST_LOST * step_us:
        return finding
    return replace(finding, ceiling=max(ceiling, step_us / (step_us - lost_us) - 1))


def joint_plan(findings: tuple[Finding, ...], predict: Predict | None) -> Plan | None:
    """The changes that can be replayed, replayed together; None for fewer than two.

    The best come first; a change that cannot be replayed with those, or makes them worse, is left out.
    """
    changes = [finding.whatif for finding in findings if finding.obtained is Obtained.REPLAYED and finding.whatif]
    if len(changes) < 2 or predict is None:
        return None
    plan: Plan | None = None
    taken = 0
    for change in changes:
        settings = {**change, **(plan.whatif if plan is not None else {})}
        step = predict(settings)
        if step is not None and (plan is None or step.mid < plan.predicted_step_us.mid):
            plan, taken = Plan(whatif=settings, predicted_step_us=step), taken + 1
    return plan if taken > 1 else None


def _replayed(finding: Finding, job: RuleContext) -> Finding:
    """With the step time that its change would bring, where that can be replayed: what ``perfscope whatif`` predicts,
    or where a rule knows better than the replay, what the rule does, without settings that would replay another.
    """
    if not finding.whatif or job.predict is None:
        return finding
    prediction, own = job.predict(finding.whatif), finding.predicted_step_us
    if own is not None and (prediction is None or abs(prediction.mid / own.mid - 1) > _SAME):
        return _worth_no_less(replace(finding, whatif={}), own, job)
    if prediction is None:
        return finding
    return _worth_no_less(replace(finding, predicted_step_us=prediction, obtained=Obtained.REPLAYED), prediction, job)


def _worth_no_less(finding: Finding, predicted: Prediction, job: RuleContext) -> Finding:
    """With a bound and a severity no lower than what is predicted: they are of the typical rank and of the time that is
    seen to be lost, and a replay gains on others and behind that, too.
    """
    saved = Severity.of_share(1 - predicted.mid / job.step_time_us)
    if finding.severity is not Severity.INFO:
        finding = replace(finding, severity=max(finding.severity, saved, key=_SEVERE.index))
    if finding.ceiling is None:
        return finding
    return replace(finding, ceiling=max(finding.ceiling, job.step_time_us / predicted.mid - 1))


def as_sure_as_findings(
    rows: tuple[StragglerRow, ...], findings: tuple[Finding, ...], job: RuleContext
) -> tuple[StragglerRow, ...]:
    """Stragglers, each with no more confidence than the finding about it has, and than the recording allows."""
    about = {one.straggling: one.confidence for one in findings if one.straggling}
    limits = [min(about.get(row.members, Confidence.HIGH), _of_recording(job), key=_SURENESS.index) for row in rows]
    return tuple(
        replace(row, confidence=min(Confidence(row.confidence), limit, key=_SURENESS.index).value)
        for row, limit in zip(rows, limits, strict=True)
    )


def _of_recording(job: RuleContext) -> Confidence:
    """The most that is possible where profiling has changed what is measured."""
    ratio = job.info.perturbation or 1.0
    if ratio >= 2 * PERTURBED:
        return Confidence.LOW
    return Confidence.MEDIUM if ratio >= PERTURBED else Confidence.HIGH


def _confidence(finding: Finding, job: RuleContext, step_us: float) -> Confidence:
    """No more than the prediction, which is of a step of so many microseconds, and the recording allow."""
    # A range that reaches from a gain to none leaves the advice in doubt, however sure its evidence.
    predicted = finding.predicted_step_us
    doubtful = predicted is not None and predicted.mid < step_us <= predicted.high
    of_prediction = Confidence.MEDIUM if doubtful else Confidence.HIGH
    return min(finding.confidence, of_prediction, _of_recording(job), key=_SURENESS.index)
