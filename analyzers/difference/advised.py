"""Findings gone, new and still there; and what was advised before and then tried: did the prediction come true?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from perfscope.analyzers.difference.settings import FOLLOWS, settings
from perfscope.comparison import FindingChange, SettingChange, StepChange, Tried
from perfscope.summary import FindingRow, Summary

Ask = Callable[[Mapping[str, str]], dict[str, float] | None]
"""Settings of ``perfscope whatif`` -> low, mid, high of the step time in µs, played on the recording before; None where
they cannot be."""

CURED: Final = 0.05
"""Share of the step that a straggler may still cost to count as at its peers' pace: what the rule fires on."""


def finding_changes(before: Summary, after: Summary) -> tuple[FindingChange, ...]:
    """By rule: what is gone first, then what is new, then what is still there; none without both accounts."""
    if not before.accounting or not after.accounting:
        return ()
    first = {finding.rule: finding for finding in before.findings}
    second = {finding.rule: finding for finding in after.findings}
    found = []
    for rule in {**first, **second}:
        old, new = first.get(rule), second.get(rule)
        shown = new or old
        assert shown is not None
        found.append(
            FindingChange(
                rule=rule,
                status="gone" if new is None else "new" if old is None else "still",
                title=shown.title,
                severity_before=old.severity if old else None,
                severity_after=new.severity if new else None,
            )
        )
    order = {"gone": 0, "new": 1, "still": 2}
    return tuple(sorted(found, key=lambda change: order[change.status]))


def tried_changes(
    before: Summary, after: Summary, step: StepChange, changed: tuple[SettingChange, ...], ask: Ask | None = None
) -> tuple[Tried, ...]:
    """Changes that can be predicted, and were made: those that findings advised, and with ``ask`` any other."""
    first, second = playable(before), playable(after)
    tried = [
        _tried(finding, before, after, step, changed, ask)
        for finding in before.findings
        if any(name in second and _value(first, name) != _value(second, name) for name in finding.whatif)
    ]
    advised = {name for one in tried for name in one.settings}
    made = {name: second[name] for name in second if name in first and first[name] != second[name]}
    others = {name: value for name, value in made.items() if name not in advised}
    if others and ask is not None and not tried:
        predicted = ask(others)
        if predicted is not None:
            tried.append(_judged(None, others, before, after, step, changed, predicted))
    return tuple(tried)


def playable(summary: Summary) -> dict[str, str]:
    """What ``perfscope whatif`` could change, at its present value; only what the recording tells."""
    told = settings(summary)
    names = ("dataloader.num_workers", "ddp.bucket_cap_mb")
    found: dict[str, str] = {name: told[name] for name in names if name in told}
    accumulation = summary.job.settings.get("gradient_accumulation", {})
    if "no_sync" in accumulation:
        found["ddp.no_sync"] = "true" if accumulation["no_sync"] else "false"
    named = (summary.job.strategy,) if isinstance(summary.job.strategy, str) else summary.job.strategy
    stages = [name.removeprefix("zero") for name in named if name.startswith("zero")]
    if stages or "ddp" in named:
        found["zero.stage"] = stages[0] if stages else "0"
    if summary.pipeline is not None and summary.pipeline.microbatches is not None:
        found["pipeline.microbatches"] = str(summary.pipeline.microbatches)
    slow = {
        rank
        for row in summary.stragglers
        if row.lost_us >= CURED * summary.job.step_time_us
        for rank in (row.ranks or (row.rank,))
    }
    # Without an account, as of a recording of step times alone, nothing tells who made the others wait.
    if summary.accounting:
        found.update({f"rank.{rank}": "slow" if rank in slow else "peers" for rank in summary.job.ranks})
    return found


def _value(known: Mapping[str, str], name: str) -> str | None:
    """A setting's value, numbers as whatif writes them: 25.0 is 25."""
    value = known.get(name)
    return None if value is None else _plain(value)


def _plain(value: str) -> str:
    try:
        return f"{float(value):g}"
    except ValueError:
        return value


def _tried(
    finding: FindingRow,
    before: Summary,
    after: Summary,
    step: StepChange,
    changed: tuple[SettingChange, ...],
    ask: Ask | None,
) -> Tried:
    second = playable(after)
    otherwise = {
        name: second[name]
        for name, value in finding.whatif.items()
        if name in second and _value(second, name) != _plain(value)
    }
    predicted = finding.predicted_step_us
    if otherwise:
        # Another value than advised was tried: the advice's prediction is not for it.
        predicted = ask({**finding.whatif, **otherwise}) if ask is not None else None
    return _judged(finding, dict(finding.whatif), before, after, step, changed, predicted)


def _judged(
    finding: FindingRow | None,
    advised: dict[str, str],
    before: Summary,
    after: Summary,
    step: StepChange,
    changed: tuple[SettingChange, ...],
    predicted: dict[str, float] | None,
) -> Tried:
    first, second = playable(before), playable(after)
    saving = before.job.step_time_us - predicted["mid"] if predicted else None
    as_advised = finding is not None and all(_value(second, name) == _plain(advised[name]) for name in advised)
    return Tried(
        rule=finding.rule if finding else "",
        title=finding.title if finding else "",
        settings=advised,
        before={name: first.get(name, "not known") for name in advised},
        after={name: second.get(name, "not known") for name in advised},
        as_advised=as_advised,
        predicted_us=predicted,
        ceiling=finding.ceiling if finding and as_advised and math.isfinite(finding.ceiling or 0.0) else None,
        measured_us=after.job.step_time_us,
        verdict=_verdict(predicted, step),
        realised=-step.delta_us / saving if saving and abs(saving) > (step.noise_us or 0.0) else None,
        also_changed=tuple(_others(changed, advised)),
    )


def _verdict(predicted: dict[str, float] | None, step: StepChange) -> str:
    """Measured within the predicted range, widened by the noise of the measurement?"""
    if predicted is None or step.noise_us is None or step.verdict == "unknown" or step.confirmed is False:
        return "not judged"
    noise = step.noise_us
    effect = step.before_us - predicted["mid"]
    if predicted["low"] - noise <= step.after_us <= predicted["high"] + noise:
        # An effect that drowns in noise did not come true only because the range is wide.
        return "came true" if step.verdict != "same" or abs(effect) <= noise else "no effect"
    if step.after_us < predicted["low"]:
        return "brought more"
    return {"slower": "made it slower", "same": "no effect"}.get(step.verdict, "brought less")


def _others(changed: tuple[SettingChange, ...], advised: Mapping[str, str]) -> Iterator[str]:
    """What else changed that may matter: the user's settings and the job, not what follows from a setting."""
    for change in changed:
        follows = change.name in advised or change.name in FOLLOWS or change.about == "command"
        if not follows and change.name != "hosts":
            yield change.name
