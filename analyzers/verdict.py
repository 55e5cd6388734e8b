"""The headline and the first action: what limits the job, who, by how much, and what to change first."""

from __future__ import annotations

import math
from typing import Final

from perfscope.analyzers.job.pipelines.table import inherent_bubble_share
from perfscope.results.categories import BY_ID
from perfscope.results.findings import Action, Finding, Obtained, Severity
from perfscope.results.rows import Verdict
from perfscope.results.summary import Summary
from perfscope.results.tables import Pipeline
from perfscope.results.time_breakdown import shares as shares_of
from perfscope.text import factor
from perfscope.trace.trace import WHOLE_GRAPH

LARGE: Final = 0.20
"""From this share of the step in one category a job without findings is not healthy."""

BEYOND_IDEAL: Final = 0.05
"""Share of the step by which a pipeline bubble must exceed the inherent one for both to be named."""


def verdict(summary: Summary) -> Verdict:
    """The headline is the finding with the largest gain; without one, it follows the time breakdown."""
    serious = [finding for finding in summary.findings if finding.severity in (Severity.HIGH, Severity.MEDIUM)]
    if serious:
        first = serious[0]
        return Verdict(headline=f"{first.title}.", healthy=False, first_action=_first_action(first, summary))
    shares = shares_of(summary.time_breakdown)
    compute = shares.pop("compute")
    bubble = _without_bubble(shares, summary.pipeline)
    category, share = max(shares.items(), key=lambda item: item[1])
    what = _in_words(category, share, summary)
    step = "step" if summary.job.steps else "recording"
    if share >= LARGE:
        besides = f", besides the pipeline bubble of {bubble}" if bubble else ""
        return Verdict(
            headline=f"{share:.0%} of the {step} is {what}{besides}; compute takes {compute:.0%}.",
            healthy=False,
            first_action=None,
        )
    graphs = sum(row.share for row in summary.kernels if row.name.startswith(WHOLE_GRAPH))
    if graphs >= LARGE:
        return Verdict(
            headline=f"No bottleneck found outside CUDA graphs, which take {graphs:.0%} of the device's time: what "
            "happens in them is not recorded.",
            healthy=False,
            first_action=None,
        )
    largest = f"; the largest other category is {what} ({share:.0%})" if share >= 0.005 else ""
    taken = f"; the pipeline bubble takes {bubble}" if bubble else ""
    return Verdict(
        headline=f"No bottleneck found: compute takes {compute:.0%} of the {step}{taken}{largest}.",
        healthy=True,
        first_action=None,
    )


def _without_bubble(shares: dict[str, float], pipeline: Pipeline | None) -> str:
    """Subtract the inherent bubble of a pipeline from ``shares``; returns the bubble in words, empty without one."""
    inherent = inherent_bubble_share(pipeline) if pipeline is not None else 0.0
    if pipeline is None or inherent < 0.005:
        return ""
    for category in ("exposed_comm_wait", "exposed_comm_transfer"):  # without its neighbours a rank seems to transfer
        part = min(shares[category], inherent)
        shares[category] -= part
        inherent -= part
    size = f"{pipeline.degree} stages, {pipeline.microbatches} micro-batches"
    if pipeline.virtual_stages > 1:
        size += f", {pipeline.virtual_stages} chunks per stage"
    ideal = pipeline.ideal_bubble_share or 0.0
    if pipeline.bubble_share - ideal >= BEYOND_IDEAL:
        size = f"{ideal:.0%} is inherent in {size}"
    return f"{pipeline.bubble_share:.0%} ({size})"


def _in_words(category: str, share: float, summary: Summary) -> str:
    """What a category is called in a sentence."""
    if category == "exposed_comm_wait" and summary.pipeline is not None:
        pipeline = summary.pipeline
        if pipeline.bubble_share - inherent_bubble_share(pipeline) >= share / 2:
            return "waiting for other stages of the pipeline"
    if category == "exposed_comm_transfer" and any(entry.wait_is_bound for entry in summary.time_breakdown):
        return "communication, which may be waiting for ranks that are not in the recording"
    return BY_ID[category].phrase


def _first_action(finding: Finding, summary: Summary) -> str:
    """What to change, and the speedup: the same as in the ranked list, predicted or at most."""
    what = _change(finding.action)
    predicted = finding.predicted_step_us
    gain = finding.gain(summary.job.step_us)
    if gain is None or not 0.005 <= gain < math.inf:
        return what
    bounded = predicted is None and finding.obtained is Obtained.BOUNDED
    return f"{what} {'Speedup: at most' if bounded else 'Predicted speedup:'} {factor(1 + gain)}."


def _change(action: Action) -> str:
    """The change as one sentence: the setting with its new value where that is one word, else the instructions."""
    new = action.new
    if new is None or new == action.old or new == "used" or (" " in new and "…" not in action.setting):
        return action.how
    if "…" in action.setting:
        what = action.setting.replace("…", new)
    elif new == "set" or any(sign in action.setting for sign in "=(:"):
        what = action.setting
    else:
        what = f"{action.setting} to {new}"
    return f"Set {what} (now {action.old})." if action.old is not None else f"Set {what}."
