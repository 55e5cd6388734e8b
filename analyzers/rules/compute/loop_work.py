"""Work of the training loop beside the training: fires when what is computed between two phases of the step, or in
hooks of the backward, takes much of it.

A model that runs without gradients (rollouts, generation, a teacher), statistics of gradients, metrics and batches that
are made in the loop are such work. The training needs it perhaps, but not in each step, or not on the thread that
trains: a bound. Rules about pauses, about loops over many tensors and about filled tensors say more of what they find.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Final

from perfscope.analyzers.job.extra_work import LoopWorkCost
from perfscope.analyzers.rank.extra.loop_work import HOOKS
from perfscope.analyzers.rank.extra.model_loops import LOOPS
from perfscope.analyzers.rank.host_activity import BETWEEN
from perfscope.analyzers.rank.loop_phases import OF_BATCH, OF_GRADIENTS
from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code

RULE: Final = "loop-work"
_PLURAL: Final = (HOOKS, LOOPS)
SHARE: Final = 0.10
"""Least share of the step that it takes."""
_TOLD: Final = 0.5
"""Share of it that another finding saves, from which that one is about it."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, about the part of the loop that takes longest."""
    worst = next(iter(job.loop_work), None)
    if worst is None or worst.us < SHARE * job.step_time_us:
        return None
    return job.finding(
        RULE,
        f"{worst.part[0].upper()}{worst.part[1:]} {'take' if worst.part in _PLURAL else 'takes'} "
        f"{job.share(worst.us):.0%} of the step: {_what(worst)}",
        worst.us,
        evidence=tuple(
            evidence
            for row in job.loop_work
            for evidence in (
                Evidence(f"time of {row.part}, per step", row.us, "us", job.ranks),
                *(
                    [Evidence(f"forwards without gradients in {row.part}, per step", row.forwards, ranks=job.ranks)]
                    if row.forwards
                    else []
                ),
            )
        ),
        action=_action(worst),
        confidence=job.confidence(Confidence.MEDIUM),
    )


def is_told(finding: Finding, others: Iterable[Finding], step_us: float) -> bool:
    """Is one of the other findings, of rules that may be about the same work, about the same part of the loop, or does
    it save most of that?
    """
    least, part = _TOLD * _saved(finding, step_us), finding.title.partition(" take")[0]
    return any(_saved(other, step_us) >= least or other.title.startswith(f"{part} runs") for other in others)


def _saved(finding: Finding, step_us: float) -> float:
    """Share of the step."""
    gain = finding.gain(step_us) or 0.0
    return gain / (1 + gain) if math.isfinite(gain) else 1.0


def _what(work: LoopWorkCost) -> str:
    called = ", ".join(work.operators)
    return f"{work.forwards:,.0f} forwards without gradients; {called}" if work.forwards >= 1 else called


def _action(work: LoopWorkCost) -> Action:
    if work.part == HOOKS:
        return Action(setting="hooks of parameters and gradients", old="in every step", new="in fewer", how=_OF_HOOKS)
    if work.part == LOOPS:
        return Action(setting="loops of the model", old="row by row", new="whole tensors", how=_OF_ROWS)
    if work.forwards >= 1 or work.of_model:
        return Action(setting="forwards without gradients", old="few samples each", new="more, or fewer", how=_OF_MODEL)
    if work.part == OF_BATCH:
        return Action(setting="preparation of the batch", old="in the loop", new="in the loader", how=_OF_BATCH)
    if work.part == BETWEEN and any(_DRAWN.search(operator) for operator in work.operators):
        return Action(setting="batches", old="made in the loop", new="made ahead", how=_OF_BATCH)
    if work.part == OF_GRADIENTS:
        return Action(setting="loops over gradients", old="one by one", new="one call for all", how=_OF_GRADIENTS)
    return Action(setting="work in the training loop", old="in every step", new="in fewer", how=_OF_LOOP)


_DRAWN: Final = re.compile(r"::(?:rand|normal|uniform)")
"""Random numbers before a forward are a batch that is made."""
_OF_GRADIENTS: Final = (
    "What changes gradients there has to be done in each step: do it for all tensors in one call, and read no number "
    "of single ones (.item(), .tolist()).\n"
    + code("python", "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=True)")
    + "\nWhat is only watched there (norms, histograms) needs no step in between: do it in fewer."
)
_OF_HOOKS: Final = (
    "Functions that register_hook and register_post_accumulate_grad_hook take run once for each gradient, and each "
    ".item() or .tolist() in them is a call of its own. Do this in fewer steps, and for all gradients in one call "
    "after the backward:\n"
    + code(
        "python",
        "if step % 100 == 0:\n"
        "    gradients = [p.grad for p in model.parameters() if p.grad is not None]\n"
        "    norms = torch.stack(torch._foreach_norm(gradients)).tolist()",
    )
)
_OF_MODEL: Final = (
    "A model runs there without gradients: a rollout, generation, a teacher or an evaluation. With small batches a "
    "forward costs nearly as much as with large ones, so give it more samples at once (more environments or prompts), "
    "run it in fewer steps, or in processes of its own beside the training. Targets that stay the same are computed "
    "once.\n" + code("python", "with torch.inference_mode():  # does a little less than torch.no_grad()\n    ...")
)
_OF_ROWS: Final = (
    "Replace Python loops over rows, samples or time steps by operators on whole tensors: indexing with a tensor, "
    "gather, scatter_add, segment_reduce, cumsum, torch.vmap; in a function of your own for autograd, too. In the "
    "backward of a loop over slices each of them fills a gradient of the whole tensor. Where no operator does it, "
    "torch.compile makes few of many.\n"
    + code(
        "python",
        "rows, index = torch.ones(3, 8), torch.tensor([0, 0, 1])\n"
        "sums = torch.zeros(2, 8).index_add(0, index, rows)  # not: for i in range(3): sums[index[i]] += rows[i]",
    )
)
_OF_BATCH: Final = (
    "If batches are made, augmented or converted there, do it in the Dataset or collate_fn of a DataLoader with "
    "workers, where the loop does not wait for it, or compile the function that does (torch.compile)."
)
_OF_LOOP: Final = (
    "Look at what the loop does there (metrics, statistics, averages, copies); perfscope run --stacks names its Python "
    "functions. Do it in fewer steps, or for all tensors in one call."
)
