"""Recompilation: fires when ``torch.compile`` compiles in the recorded steps, while devices and other ranks wait.

A compiled function is compiled again for inputs that its guards do not allow: another shape, another number in the
code. Sources: torch ``_dynamo/utils.py`` (``dynamo_timed``); PyTorch's guide to recompilation.
"""

from __future__ import annotations

from statistics import mean
from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code
from perfscope.results.rows import StragglerRow

RULE: Final = "recompilation"
SHARE: Final = 0.05
"""Least share of the recorded time."""
EXPLAINED: Final = 0.5
"""Share of the straggler cost that compiling must reach to be its cause."""
WARM_UP: Final = 0.5
"""Up to this share of the steps, the first ones, compiling may be the job's first."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: nothing is compiled in the recorded steps, or it takes little of them."""
    longest = _longest(job)
    lost = mean(longest) if longest else 0.0
    if lost < SHARE * job.step_time_us:
        return None
    compiling = [index for index, us in enumerate(longest) if us > 0]
    ranks = tuple(rank for rank in job.ranks if any(job.per_step[rank].compiling_us))
    # Compiled functions that are first called late look the same: steps that follow without compiling tell.
    first = compiling == list(range(len(compiling))) and len(compiling) <= WARM_UP * len(longest)
    steps = f"in {len(compiling)} of {len(longest)} steps"
    return job.finding(
        RULE,
        f"torch.compile still compiles in the first {len(compiling)} of {len(longest)} recorded steps: "
        f"{job.share(lost):.0%} of the time"
        if first
        else f"torch.compile compiles {steps}: {job.share(lost):.0%} of the time",
        lost,
        evidence=(
            Evidence("compiling per step, longest of the ranks", lost, "us", ranks),
            Evidence("longest compilation in one step", max(longest), "us", ranks),
            Evidence("steps in which torch.compile compiles", len(compiling), ranks=ranks),
        ),
        action=_record_later(job) if first else _fewer(job),
        confidence=Confidence.LOW if job.info.few_steps else Confidence.MEDIUM if first else Confidence.HIGH,
    )


def explains(job: RuleContext, row: StragglerRow) -> bool:
    """Is compiling the cause of this straggler?"""
    own = [mean(job.per_step[rank].compiling_us) for rank in row.members if rank in job.per_step]
    return row.cause == "host" and max(own, default=0.0) >= max(EXPLAINED * row.lost_us, SHARE * job.step_time_us)


def _longest(job: RuleContext) -> list[float]:
    """The longest compiling of any rank in each step (µs)."""
    return [max(step) for step in zip(*(steps.compiling_us for steps in job.per_step.values()), strict=True)]


def _record_later(job: RuleContext) -> Action:
    last = max(job.info.steps, default=0)
    return Action(
        setting="recorded steps",
        old=None,
        new=None,
        how="Later steps do not pay for it. Record some after everything is compiled, with perfscope run:\n"
        + code("shell", f"--wait {last}")
        + "\nIf torch.compile compiles there too, TORCH_LOGS=recompiles in the environment prints why.",
    )


def _fewer(job: RuleContext) -> Action:
    known = job.settings("compile").get("dynamic")
    return Action(
        setting="torch.compile(dynamic=…)",
        old=None if known is None else str(known),
        new=None if known is True else "True",
        how="See which guard fails:\n"
        + code("shell", "export TORCH_LOGS=recompiles")
        + "\nIf it is the shape of the input, pad batches to a few lengths, or compile for all of them:\n"
        + code("python", "model = torch.compile(model, dynamic=True)")
        + "\nIf it is a number that changes, such as a step or a learning rate, pass it as a tensor.",
        costs="Code for all shapes may be slower than code for one.",
    )
