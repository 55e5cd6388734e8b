"""Rules: results in, findings out; pure, one rule a module. ``evaluate`` asks them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules import dataloader_workers, ddp_buckets, straggling_rank
from perfscope.findings import Confidence, Finding

RULES: Final[tuple[Callable[[JobFacts], Finding | None], ...]] = (
    dataloader_workers.evaluate,
    ddp_buckets.evaluate,
    straggling_rank.evaluate,
)


PERTURBED: Final = 1.25
"""Profiled over unprofiled step time from which a recording shows another job than the one that was asked about: no
finding is sure; from twice as much none is more than a hint."""


def evaluate(facts: JobFacts) -> tuple[Finding, ...]:
    """Every finding of every rule, the one that can bring most first."""
    found = [_as_sure_as_the_recording(finding, facts) for rule in RULES if (finding := rule(facts)) is not None]
    return tuple(sorted(found, key=lambda finding: -(finding.ceiling or 0.0)))


def _as_sure_as_the_recording(finding: Finding, facts: JobFacts) -> Finding:
    ratio = facts.perturbation or 1.0
    if ratio < PERTURBED or finding.confidence is Confidence.LOW:
        return finding
    return replace(finding, confidence=Confidence.LOW if ratio >= 2 * PERTURBED else Confidence.MEDIUM)
