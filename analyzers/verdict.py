"""The answer in one breath: what limits the job, who, by how much, and what to do first."""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.findings import Finding, Obtained, Severity
from perfscope.summary import ROWS, Verdict

LARGE: Final = 0.20
"""Share of the step of a single loss from which a job without findings is not called healthy."""

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
        return Verdict(headline=f"{first.title}.", healthy=False, first_action=_first_action(first))
    shares = _mean_shares(facts)
    compute = shares.pop("compute")
    row, share = max(shares.items(), key=lambda item: item[1])
    what = _IN_WORDS[row]
    if row == "exposed_comm_transfer" and any(entry.wait_is_bound for entry in facts.accounting):
        what = "communication, or waiting in it for ranks that are not in the recording"
    step = "step" if facts.steps else "recording"
    if share >= LARGE:
        return Verdict(
            headline=f"{share:.0%} of the {step} goes to {what}; compute fills {compute:.0%}.",
            healthy=False,
            first_action=None,
        )
    loss = f", the largest loss is {share:.0%} ({what})" if share >= 0.005 else ""
    return Verdict(
        headline=f"No bottleneck found: compute fills {compute:.0%} of the {step}{loss}.",
        healthy=True,
        first_action=None,
    )


def _mean_shares(facts: JobFacts) -> dict[str, float]:
    total = sum(row.step_time_us for row in facts.accounting)
    return {name: sum(row.rows()[name] for row in facts.accounting) / total if total else 0.0 for name in ROWS}


def _first_action(finding: Finding) -> str:
    what = finding.action.how
    if finding.action.new is not None and finding.action.new != finding.action.old:
        old = f" (now {finding.action.old})" if finding.action.old is not None else ""
        what = f"Set {finding.action.setting.replace('…', finding.action.new)}{old}."
    if finding.ceiling is None:
        return what
    bound = "at most" if finding.obtained is Obtained.BOUNDED else "about"
    return f"{what} It can bring {bound} {finding.ceiling:.0%} more steps a second."
