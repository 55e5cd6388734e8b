"""Checkpoints: fires when the recorded steps spend much of their time in saving some.

``torch.save`` on one rank makes the others wait for it: where that is a straggler, ``straggling-rank`` tells of it.
``torch.distributed.checkpoint`` saves on all ranks at once, so none is late, and the collectives with which they agree
on the files are part of it.
Source: PyTorch tutorial "Asynchronous Saving with Distributed Checkpoint (DCP)".
"""

from __future__ import annotations

import math
from statistics import fmean, median
from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code
from perfscope.results.rows import StragglerRow
from perfscope.text import ranks_in_words

RULE: Final = "checkpoint-saving"
SHARE: Final = 0.05
"""Least share of the recorded time in saving, of the rank that saves longest in each step."""
_EXPLAINED: Final = 0.5
"""Part of what a straggler costs that its saving is, from which its own finding tells of it."""

_HOW: Final = (
    "Save in fewer steps, or let a thread write while the training goes on (torch.distributed.checkpoint, PyTorch "
    "2.3 or later; the process group needs a backend for the CPU, too):\n"
)
_CODE: Final = """\
from torch.distributed.checkpoint import async_save
saving = async_save({"model": model.state_dict()}, checkpoint_id=path)
# before the next one, and at the end:
saving.result()"""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: the recorded steps save little, or a straggler is told for it."""
    saving = _saving_us(job)
    # The others wait for the one that saves longest.
    times = [max(step) for step in zip(*saving.values(), strict=True)]
    lost = min(fmean(times), _most_us(job, saving)) if times else 0.0
    if lost < SHARE * job.step_time_us or any(_is_of(job, row) for row in job.summary.stragglers):
        return None
    steps = sum(us > 0 for us in times)
    ranks = tuple(rank for rank, each in saving.items() if any(each))
    return job.finding(
        RULE,
        f"Saving checkpoints takes {job.share(lost):.0%} of the time, in {steps} of {len(times)} steps"
        f"{f', on {ranks_in_words(ranks)} alone' if len(ranks) < len(job.ranks) else ''}",
        lost,
        evidence=(
            Evidence("saving checkpoints, the rank that saves longest, per step (mean)", lost, "us", ranks),
            Evidence("longest saving in one step", max(times), "us", ranks),
            Evidence("recorded steps that save one", steps, ranks=ranks),
        ),
        action=Action(
            setting="checkpoints",
            old=None,
            new=None,
            how=_HOW + code("python", _CODE),
            costs="Fewer checkpoints lose more steps at a restart. Saving beside the training takes memory of the host "
            "for a copy of the state.",
        ),
        confidence=Confidence.LOW if job.info.few_steps or steps < 2 else Confidence.MEDIUM,
    )


def _most_us(job: RuleContext, saving: dict[int, tuple[float, ...]]) -> float:
    """What saving may cost: all of it where most ranks save; else no more than the others wait."""
    idle = [rank for rank, each in saving.items() if not any(each)]
    if 2 * len(idle) < len(saving):
        return math.inf
    waits = [row.exposed_comm_wait_us for row in job.summary.time_breakdown if row.rank in idle]
    return median(waits or [0.0])


def is_most_of(job: RuleContext, us: float) -> bool:
    """Is saving, for which this rule fires, most of a time per step?"""
    saving = [fmean(each) for each in _saving_us(job).values()]
    return bool(saving) and max(saving) >= _EXPLAINED * us and evaluate(job) is not None


def _saving_us(job: RuleContext) -> dict[int, tuple[float, ...]]:
    return {rank: each.saving_us for rank, each in job.per_step.items() if each.saving_us}


def _is_of(job: RuleContext, row: StragglerRow) -> bool:
    """Is a rank late because it saves a checkpoint?"""
    own = [fmean(job.per_step[rank].saving_us) for rank in row.members if rank in job.per_step]
    others = [fmean(each.saving_us) for rank, each in job.per_step.items() if rank not in row.members]
    longer = max(own, default=0.0) - median(others or [0.0])
    return row.cause == "host" and row.lost_us >= SHARE * job.step_time_us and longer >= _EXPLAINED * row.lost_us
