"""Loops over many tensors between the phases of a step: fires when so many small operators take much of the step.

Clipping, averaging or updating parameters one by one costs Python and a launch for each, however little is computed.
``torch._foreach_*`` and what is built on it take a whole list of tensors. The step is replayed without the time from
one operator to the next; their arithmetic stays. The optimizer's own step has a rule of its own, ``optimizer_kernels``.
Source: torch.nn.utils.clip_grad_norm_ (foreach); torch.optim.swa_utils; torch.optim, "Algorithms" (foreach, fused).
"""

from __future__ import annotations

import re
from typing import Final

from perfscope.analyzers.job.extra_work import LoopCost
from perfscope.analyzers.rank.loop_phases import IN_OPTIMIZER, OF_BATCH
from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code

RULE: Final = "small-operators"
SHARE: Final = 0.05
"""Least share of the step that the replay saves."""
_NAMED: Final = 3
_CHANGE: Final = {"loop.operators": "0"}


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, about the part of the training loop with the costliest of these loops."""
    loops = [row for row in job.loops if row.part != IN_OPTIMIZER]
    replayed = job.replayed(_CHANGE, SHARE) if loops else None
    if replayed is None:
        return None
    prediction, saved_us = replayed
    worst = loops[0]
    what = "kernels" if job.on_devices else "operators"
    called = ", ".join(worst.operators[:_NAMED])
    return job.finding(
        RULE,
        f"{_place(worst.part)} runs {worst.count:,.0f} small {what} per step, one after the other, in "
        f"{job.share(worst.us):.0%} of the step: {called}",
        # Their arithmetic stays in the prediction; one call may compute it in a fraction of the time.
        max(saved_us, sum(row.us for row in loops)),
        evidence=tuple(
            evidence
            for row in loops
            for evidence in (
                Evidence(f"{what} of loops in {row.part}, per step", row.count, ranks=job.ranks),
                Evidence(f"time in them, and from one to the next ({row.part})", row.us, "us", job.ranks),
            )
        ),
        action=_action(worst),
        confidence=job.confidence(Confidence.MEDIUM),
        predicted=prediction,
        whatif=_CHANGE,
        severity_us=saved_us,
    )


def _place(part: str) -> str:
    return f"{part[0].upper()}{part[1:]}"


def _action(loop: LoopCost) -> Action:
    """By what the loop calls and where: norms are for clipping, roots for an update by hand, after it come averages."""
    called = " ".join(loop.operators)
    if loop.part == OF_BATCH:
        return Action(
            setting="preparation of the batch", old="one operator after another", new="compiled, or in the loader",
            how=_PREPARATION,
        )  # fmt: skip
    named = next((how for names, parts, how in _KNOWN if names.search(called) and parts in loop.part), "")
    return Action(
        setting="loops over parameters",
        old="one operator for each tensor",
        new="one call for all",
        how=f"{named}Functions of torch._foreach_* take lists of tensors:\n{_FOREACH}",
        costs="Memory for what such a call computes of all tensors at once.",
    )


_FOREACH: Final = code(
    "python",
    "with torch.no_grad():\n    torch._foreach_mul_(tensors, 0.9)  # not: for tensor in tensors: tensor.mul_(0.9)",
)
_PREPARATION: Final = (
    "If these augment or convert the batch, compile the function that does, which makes few kernels of many (on "
    "devices with graphs one launch):\n"
    + code("python", "@torch.compile\ndef prepare(batch):\n    return batch  # after what the loop does with it now")
    + "\nOr do it in the DataLoader's workers, where the loop does not wait for it."
)
_CLIPPING: Final = code("python", "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=True)")
_AVERAGES: Final = code(
    "python",
    "with torch.no_grad():\n    torch._foreach_lerp_(averages, list(model.parameters()), 1 - decay)",
)
_OR_AVERAGED: Final = "Or torch.optim.swa_utils.AveragedModel with multi_avg_fn=get_ema_multi_avg_fn(decay)."
_READING: Final = (
    "If this loop prints or checks tensors one by one (print, .item(), .tolist(), isfinite), do it in fewer steps:\n"
    + code("python", "if step % 100 == 0:\n    value = loss.item()")
    + "\n"
)
_KNOWN: Final = (
    (re.compile("^aten::(item|_local_scalar_dense|isfinite|isnan|is_nonzero)"), "", _READING),
    (re.compile("norm"), "", f"If this loop clips gradients, do it in one call:\n{_CLIPPING}\n"),
    (
        re.compile("sqrt|addcdiv|addcmul"), "",
        "If this loop updates parameters, use an optimizer of torch.optim, with fused=True.\n",
    ),
    (
        re.compile("lerp|mul|add|copy_"), "optimizer and",
        f"If this loop averages parameters (EMA), do it in one call:\n{_AVERAGES}\n{_OR_AVERAGED}\n",
    ),
)  # fmt: skip
"""What such loops are for: names of operators, the most frequent first, part of the training loop, what to do."""
