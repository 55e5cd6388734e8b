"""The answer in one breath: what limits the job, who, by how much, and what to do first."""

from __future__ import annotations

import math
from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.pipelines.table import inherent_bubble_share
from perfscope.findings import Action, Finding, Obtained, Severity
from perfscope.summary import ROWS, Verdict
from perfscope.summary_tables import Pipeline

LARGE: Final = 0.20
"""Share of the step of a single loss from which a job without findings is not called healthy."""

BEYOND_IDEAL: Final = 0.05
"""Share of the step by which a pipeline's bubble exceeds the best possible one from which the two are told apart."""

_IN_WORDS: Final = {
    "exposed_comm_wait": "waiting for other ranks in collectives",
    "exposed_comm_transfer": "communication that no computation hides",
    "exposed_copy": "copies that no computation hides",
    "idle_dataloader": "waiting for the data loader",
    "idle_sync": "the device run dry by host synchronisation",
    "idle_launch": "the device waiting for launches",
    "idle_host": "host work between operators",
    "idle_dependency": "queued work waiting on events or other streams",
    "idle_unknown": "idle time without a visible cause",
}


def verdict(facts: JobFacts, findings: tuple[Finding, ...]) -> Verdict:
    """The headline follows the finding that can bring most; without one, the account itself."""
    serious = [finding for finding in findings if finding.severity in (Severity.HIGH, Severity.MEDIUM)]
    if serious:
        first = serious[0]
        return Verdict(headline=f"{first.title}.", healthy=False, first_action=_first_action(first, facts))
    shares = _mean_shares(facts)
    compute = shares.pop("compute")
    bubble = _without_bubble(shares, facts.pipeline)
    row, share = max(shares.items(), key=lambda item: item[1])
    what = _in_words(row, share, facts)
    step = "step" if facts.steps else "recording"
    if share >= LARGE:
        beside = f", besides the {bubble} that the pipeline's bubble takes" if bubble else ""
        return Verdict(
            headline=f"{share:.0%} of the {step} goes to {what}{beside}; compute fills {compute:.0%}.",
            healthy=False,
            first_action=None,
        )
    loss = f", the largest{' other' if bubble else ''} loss is {share:.0%} ({what})" if share >= 0.005 else ""
    taken = f"; the pipeline's bubble takes {bubble}" if bubble else ""
    return Verdict(
        headline=f"No bottleneck found: compute fills {compute:.0%} of the {step}{taken}{loss}.",
        healthy=True,
        first_action=None,
    )


def _without_bubble(shares: dict[str, float], pipeline: Pipeline | None) -> str:
    """Take out of ``shares`` what the stages and micro-batches of a pipeline cost however well it runs; the bubble's
    share in words, empty where there is nothing to take out.
    """
    inherent = inherent_bubble_share(pipeline) if pipeline is not None else 0.0
    if pipeline is None or inherent < 0.005:
        return ""
    for row in ("exposed_comm_wait", "exposed_comm_transfer"):  # without its neighbours a rank seems to transfer
        part = min(shares[row], inherent)
        shares[row] -= part
        inherent -= part
    size = f"{pipeline.degree} stages, {pipeline.microbatches} micro-batches"
    if pipeline.virtual_stages > 1:
        size += f", {pipeline.virtual_stages} chunks a stage"
    ideal = pipeline.ideal_bubble_share or 0.0
    if pipeline.bubble_share - ideal >= BEYOND_IDEAL:
        size = f"{ideal:.0%} at best with {size}"
    return f"{pipeline.bubble_share:.0%} ({size})"


def _in_words(row: str, share: float, facts: JobFacts) -> str:
    """What a row of the account is, in a sentence."""
    if row == "exposed_comm_wait" and facts.pipeline is not None:
        pipeline = facts.pipeline
        if pipeline.bubble_share - inherent_bubble_share(pipeline) >= share / 2:
            return "waiting for other stages of the pipeline"
    if row == "exposed_comm_transfer" and any(entry.wait_is_bound for entry in facts.accounting):
        return "communication, or waiting in it for ranks that are not in the recording"
    return _IN_WORDS[row]


def _mean_shares(facts: JobFacts) -> dict[str, float]:
    total = sum(row.step_time_us for row in facts.accounting)
    return {name: sum(row.rows()[name] for row in facts.accounting) / total if total else 0.0 for name in ROWS}


def _first_action(finding: Finding, facts: JobFacts) -> str:
    """What to do, and what it brings: the same figure as in the ranked list, a prediction before a bound."""
    what = _change(finding.action)
    predicted = finding.predicted_step_ns
    gain = facts.step_time_us * 1e3 / predicted.mid - 1 if predicted is not None and predicted.mid else finding.ceiling
    if gain is None or not 0.005 <= gain < math.inf:
        return what
    bound = "at most" if predicted is None and finding.obtained is Obtained.BOUNDED else "about"
    return f"{what} It can bring {bound} {gain:.0%} more steps a second."


def _change(action: Action) -> str:
    """The change as one sentence: the setting with its new value where that is one word, else how to make it."""
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
