"""Rules: results in, findings out; pure, one rule a module. ``evaluate`` asks them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules import dataloader_workers, ddp_buckets, straggling_rank
from perfscope.findings import Finding

RULES: Final[tuple[Callable[[JobFacts], Finding | None], ...]] = (
    dataloader_workers.evaluate,
    ddp_buckets.evaluate,
    straggling_rank.evaluate,
)


def evaluate(facts: JobFacts) -> tuple[Finding, ...]:
    """Every finding of every rule, the one that can bring most first."""
    found = [finding for rule in RULES if (finding := rule(facts)) is not None]
    return tuple(sorted(found, key=lambda finding: -(finding.ceiling or 0.0)))
