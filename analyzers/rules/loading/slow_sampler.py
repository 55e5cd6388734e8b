"""Slow samplers: fires when drawing the indices of batches, which the training thread does itself, blocks the step.

A sampler that shuffles a list of millions, or sorts samples by their lengths, does so where an epoch begins: all ranks
wait, and more workers change nothing. One that computes for each batch blocks every step. Source: torch
``utils/data/dataloader.py``, ``_next_index``; ``utils/data/sampler.py``.
"""

from __future__ import annotations

from statistics import median
from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code

RULE: Final = "slow-sampler"
SHARE: Final = 0.05
"""Least share of the recorded time that the sampler blocks."""
MOST: Final = 0.9
"""Share of the sampler's time in the longest steps from which it is said to work there only."""
RARE: Final = 0.25
"""Largest share of the steps that these may be."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: the sampler hardly blocks the step, blocks one rank of many only, or is not recorded."""
    per_rank = [steps.sampling_us for steps in job.per_step.values()]
    sampling = [median(step) for step in zip(*per_rank, strict=True)]
    blocked_us = sum(sampling) / len(sampling) if sampling else 0.0
    if blocked_us < SHARE * job.step_time_us:
        return None
    starts = _few(sampling)
    lost = _lost_us(job, sampling, starts) if starts else blocked_us
    when = f" in {starts} of {job.steps} steps" if starts else ""
    return job.finding(
        RULE,
        f"The data loader's sampler blocks {job.share(blocked_us):.0%} of the recorded time{when}",
        lost,
        evidence=(
            Evidence("drawing indices, longest step", max(sampling), "us", job.ranks),
            Evidence("drawing indices per step (mean)", blocked_us, "us", job.ranks),
            Evidence("step time", job.step_time_us, "us", job.ranks),
        ),
        action=Action(setting="DataLoader(sampler=…)", old=_name(job), new=None, how=_HOW),
        confidence=Confidence.LOW if job.info.few_steps or starts == 1 else Confidence.HIGH,
        severity_us=blocked_us,
    )


def _few(sampling: list[float]) -> int:
    """The number of steps in which nearly all of it happens, such as the first ones of epochs; 0 where all steps share
    it.
    """
    longest, total, count = sorted(sampling, reverse=True), 0.0, 0
    while total < MOST * sum(sampling):
        total += longest[count]
        count += 1
    return count if count <= max(RARE * len(sampling), 1) and len(sampling) > 1 else 0


def _lost_us(job: RuleContext, sampling: list[float], starts: int) -> float:
    """Mean per step of the whole run: once per epoch where its length is known, however many were recorded."""
    loader = job.loader
    if loader is None or not loader.batches_per_epoch:
        return sum(sampling) / len(sampling)
    taken = max((row.batches_per_step for row in job.summary.dataloader), default=1.0)
    steps = max(loader.batches_per_epoch / max(taken, 1.0), 1.0)
    return sum(sampling) / max(starts, 1) / steps


def _name(job: RuleContext) -> str | None:
    return (job.loader.sampler or None) if job.loader is not None else None


_HOW: Final = (
    "The sampler draws indices on the training thread, however many workers there are. Hold the order as a tensor or "
    "an array instead of a Python list, and make the next epoch's order in a thread while this one trains.\n"
    + code(
        "python",
        "class Shuffled(torch.utils.data.Sampler):\n"
        "    def __iter__(self):\n"
        "        for part in torch.randperm(self.length).split(10_000):  # a tensor, not a list of everything\n"
        "            yield from part.tolist()",
    )
    + "\nOf very large datasets shuffle blocks of samples, and the samples within a block."
)
