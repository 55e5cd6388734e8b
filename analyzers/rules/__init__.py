"""Rules: results in, findings out; pure, one rule a module. ``evaluate`` asks them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules import (
    batch_size,
    bucket_view,
    cpu_oversubscription,
    dataloader_workers,
    ddp_buckets,
    debug_settings,
    deepspeed_buckets,
    fsdp_prefetch,
    garbage_collection,
    gradient_compression,
    host_syncs,
    imbalanced_work,
    launch_bound,
    loader_startup,
    megatron_overlap,
    memory_limit,
    mixed_precision,
    nccl_environment,
    no_sync,
    offload,
    pinned_memory,
    pipeline_bubble,
    pipeline_imbalance,
    sampler,
    sharding_stage,
    straggling_rank,
    tensor_parallel_span,
    unused_parameters,
)
from perfscope.findings import Confidence, Finding, Obtained, Prediction, Severity

RULES: Final[tuple[Callable[[JobFacts], Finding | None], ...]] = (
    batch_size.evaluate,
    bucket_view.evaluate,
    cpu_oversubscription.evaluate,
    dataloader_workers.evaluate,
    ddp_buckets.evaluate,
    debug_settings.evaluate,
    deepspeed_buckets.evaluate,
    fsdp_prefetch.evaluate,
    garbage_collection.evaluate,
    gradient_compression.evaluate,
    host_syncs.evaluate,
    imbalanced_work.evaluate,
    launch_bound.evaluate,
    loader_startup.evaluate,
    megatron_overlap.evaluate,
    memory_limit.evaluate,
    mixed_precision.evaluate,
    nccl_environment.evaluate,
    no_sync.evaluate,
    offload.evaluate,
    pinned_memory.evaluate,
    pipeline_bubble.evaluate,
    pipeline_imbalance.evaluate,
    sampler.evaluate,
    sharding_stage.evaluate,
    straggling_rank.evaluate,
    tensor_parallel_span.evaluate,
    unused_parameters.evaluate,
)


PERTURBED: Final = 1.25
"""Profiled over unprofiled step time from which a recording shows another job than the one that was asked about: no
finding is sure; from twice as much none is more than a hint."""


def evaluate(facts: JobFacts) -> tuple[Finding, ...]:
    """Every finding of every rule, the one that can bring most first; what is no defect comes last."""
    found = [finding for rule in RULES if (finding := rule(facts)) is not None]
    found = [
        _as_sure_as_its_gain(_as_sure_as_the_recording(_played(finding, facts), facts), facts) for finding in found
    ]
    return tuple(sorted(found, key=lambda finding: (finding.severity is Severity.INFO, -_gain(finding, facts))))


def joint_plan(findings: tuple[Finding, ...], facts: JobFacts) -> tuple[dict[str, str], Prediction] | None:
    """The changes that can be replayed, played together; None for fewer than two.

    The best come first; one that cannot be played with those, or makes them worse, is left out.
    """
    playable = [finding.whatif for finding in findings if finding.obtained is Obtained.REPLAYED and finding.whatif]
    if len(playable) < 2 or facts.predict is None:
        return None
    settings: dict[str, str] = {}
    prediction: Prediction | None = None
    taken = 0
    for change in playable:
        together = facts.predict({**change, **settings})
        if together is not None and (prediction is None or together.mid < prediction.mid):
            settings, prediction, taken = {**change, **settings}, together, taken + 1
    return (settings, prediction) if prediction is not None and taken > 1 else None


def _played(finding: Finding, facts: JobFacts) -> Finding:
    """With the step time that its change would bring, where that can be replayed."""
    if not finding.whatif or facts.predict is None or finding.predicted_step_ns is not None:
        return finding
    prediction = facts.predict(finding.whatif)
    if prediction is None:
        return finding
    played = replace(finding, predicted_step_ns=prediction, obtained=Obtained.REPLAYED)
    if finding.ceiling is None:
        return played
    # The bound is of the typical rank; where the replay gains on others too, it bounds nothing lower than that.
    return replace(played, ceiling=max(finding.ceiling, _gain(played, facts)))


def _gain(finding: Finding, facts: JobFacts) -> float:
    """More steps a second: predicted where it was replayed, else at most."""
    if finding.predicted_step_ns is not None:
        return facts.step_time_us * 1e3 / finding.predicted_step_ns.mid - 1
    return finding.ceiling or 0.0


def _as_sure_as_its_gain(finding: Finding, facts: JobFacts) -> Finding:
    """A range that reaches from a gain to none leaves the advice in doubt, however sure its evidence."""
    predicted = finding.predicted_step_ns
    doubtful = predicted is not None and predicted.mid < facts.step_time_us * 1e3 <= predicted.high
    return (
        replace(finding, confidence=Confidence.MEDIUM)
        if doubtful and finding.confidence is Confidence.HIGH
        else finding
    )


def _as_sure_as_the_recording(finding: Finding, facts: JobFacts) -> Finding:
    ratio = facts.perturbation or 1.0
    if ratio < PERTURBED or finding.confidence is Confidence.LOW:
        return finding
    return replace(finding, confidence=Confidence.LOW if ratio >= 2 * PERTURBED else Confidence.MEDIUM)
