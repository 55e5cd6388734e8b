"""Rules: results in, findings out; pure, one rule a module. ``evaluate`` asks them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules import (
    cpu_oversubscription,
    dataloader_workers,
    ddp_buckets,
    no_sync,
    pipeline_bubble,
    pipeline_imbalance,
    straggling_rank,
)
from perfscope.findings import Confidence, Finding, Obtained, Prediction, Severity

RULES: Final[tuple[Callable[[JobFacts], Finding | None], ...]] = (
    cpu_oversubscription.evaluate,
    dataloader_workers.evaluate,
    ddp_buckets.evaluate,
    no_sync.evaluate,
    pipeline_bubble.evaluate,
    pipeline_imbalance.evaluate,
    straggling_rank.evaluate,
)


PERTURBED: Final = 1.25
"""Profiled over unprofiled step time from which a recording shows another job than the one that was asked about: no
finding is sure; from twice as much none is more than a hint."""


def evaluate(facts: JobFacts) -> tuple[Finding, ...]:
    """Every finding of every rule, the one that can bring most first; what is no defect comes last."""
    found = [finding for rule in RULES if (finding := rule(facts)) is not None]
    found = [_as_sure_as_the_recording(_played(finding, facts), facts) for finding in found]
    return tuple(sorted(found, key=lambda finding: (finding.severity is Severity.INFO, -_gain(finding, facts))))


def joint_plan(findings: tuple[Finding, ...], facts: JobFacts) -> tuple[dict[str, str], Prediction] | None:
    """All changes that can be replayed, played together; None for fewer than two."""
    playable = [finding.whatif for finding in findings if finding.obtained is Obtained.REPLAYED and finding.whatif]
    if len(playable) < 2 or facts.predict is None:
        return None
    settings = {name: value for change in reversed(playable) for name, value in change.items()}
    prediction = facts.predict(settings)
    return (settings, prediction) if prediction is not None else None


def _played(finding: Finding, facts: JobFacts) -> Finding:
    """With the step time that its change would bring, where that can be replayed."""
    if not finding.whatif or facts.predict is None or finding.predicted_step_ns is not None:
        return finding
    prediction = facts.predict(finding.whatif)
    if prediction is None:
        return finding
    return replace(finding, predicted_step_ns=prediction, obtained=Obtained.REPLAYED)


def _gain(finding: Finding, facts: JobFacts) -> float:
    """More steps a second: predicted where it was replayed, else at most."""
    if finding.predicted_step_ns is not None:
        return facts.step_time_us * 1e3 / finding.predicted_step_ns.mid - 1
    return finding.ceiling or 0.0


def _as_sure_as_the_recording(finding: Finding, facts: JobFacts) -> Finding:
    ratio = facts.perturbation or 1.0
    if ratio < PERTURBED or finding.confidence is Confidence.LOW:
        return finding
    return replace(finding, confidence=Confidence.LOW if ratio >= 2 * PERTURBED else Confidence.MEDIUM)
