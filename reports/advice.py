"""Findings in words: what to change, and how honestly its worth can be stated."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from perfscope.reports import money
from perfscope.reports.format import duration, known, measure, rank_list, share, significant
from perfscope.summary import FindingRow, Summary

_TYPED: Final = re.compile(r"[\n=`{]|\w\(")
"""In what is there to be typed: several lines, an assignment, a call, quoted code."""


@dataclass(frozen=True)
class Gain:
    """What a change is worth."""

    short: str
    """A few words, for the ranked list."""
    full: str
    """A sentence that says how the number was obtained."""
    definition: str
    """Key of the glossary."""


@dataclass(frozen=True)
class EvidenceLine:
    """One number a finding rests on, written."""

    what: str
    value: str
    ranks: str


@dataclass(frozen=True)
class Length:
    """A step time as a bar; places are per cent of the longest bar."""

    label: str
    definition: str
    text: str
    width: float
    kind: str
    """``now``, ``predicted`` or ``ceiling``."""
    low: float | None = None
    """Where the prediction's range begins and ends."""
    high: float | None = None


@dataclass(frozen=True)
class Card:
    """One finding as the page shows it."""

    number: int
    finding: FindingRow
    gain: Gain
    evidence: tuple[EvidenceLine, ...]
    lengths: tuple[Length, ...]
    """The step now, as predicted and at best; empty where no gain is stated."""
    command: str
    """What to type to replay the change, or a variation of it; empty where it cannot be replayed."""
    saving: str
    """In money; empty where no price was given."""

    @property
    def advice(self) -> str:
        """What to do where that is a sentence, with nothing in it to copy; empty where there is something to type."""
        action = self.finding.action
        is_sentence = action.new is None and action.how.endswith(".") and not _TYPED.search(action.how)
        return action.how if is_sentence else ""

    @property
    def anchor(self) -> str:
        """Id of the card on the page."""
        return f"finding-{self.number}"


def cards(summary: Summary) -> tuple[Card, ...]:
    """The findings, in their order, numbered from 1."""
    return tuple(
        Card(
            number,
            finding,
            gain(finding, summary),
            tuple(_evidence(finding)),
            lengths(finding, summary),
            whatif_command(finding.whatif, summary.source),
            _saving(summary, number - 1),
        )
        for number, finding in enumerate(summary.findings, start=1)
    )


def lengths(finding: FindingRow, summary: Summary) -> tuple[Length, ...]:
    """The step now, as predicted with the change, and at best (its ceiling); empty where no gain is stated."""
    step, predicted = summary.job.step_time_us, finding.predicted_step_us
    bars, told = [], ""
    longest = step
    if predicted is not None and all(known(predicted.get(key)) for key in ("low", "mid", "high")):
        low, mid, high = (predicted[key] for key in ("low", "mid", "high"))
        longest = max(step, high)
        told = duration(mid)
        span = f" ({duration(low)} to {duration(high)})" if duration(low) != duration(high) else ""
        place = (100 * low / longest, 100 * high / longest) if longest > 0 else (None, None)
        label = "Measured" if finding.obtained == "measured" else "Predicted"
        bars.append((label, "prediction", told + span, mid, "predicted", place))
    if finding.ceiling is not None and known(finding.ceiling):
        best = step / (1 + finding.ceiling)
        if duration(best) != told:  # the same as predicted is said once
            bars.append(("At best", "ceiling", duration(best), best, "ceiling", (None, None)))
    if not bars or not longest > 0:
        return ()
    bars.insert(0, ("Now", "step_time", duration(step), step, "now", (None, None)))
    return tuple(
        Length(label, definition, text, 100 * us / longest, kind, *place)
        for label, definition, text, us, kind, place in bars
    )


def whatif_command(settings: Mapping[str, str], source: str) -> str:
    """``perfscope whatif`` with these settings, as one would type it; empty without settings."""
    if not settings:
        return ""
    changes = " ".join(f"--set {shlex.quote(f'{name}={value}')}" for name, value in settings.items())
    return f"perfscope whatif {shlex.quote(source or 'TRACES')} {changes}"


def _saving(summary: Summary, finding: int) -> str:
    cost = summary.cost
    row = next((row for row in cost.savings if row.finding == finding), None) if cost is not None else None
    return money.saving(row, cost) if row is not None and cost is not None else ""


def gain(finding: FindingRow, summary: Summary) -> Gain:
    """The worth of one change: a prediction where there is one, else its ceiling, named as such."""
    predicted = finding.predicted_step_us
    if predicted is not None and known(predicted.get("mid")) and predicted["mid"] > 0:
        return _prediction(finding, predicted, summary)
    ceiling = finding.ceiling
    if ceiling is None or math.isnan(ceiling):
        return Gain("no gain stated", "No gain is stated: this costs nothing by itself.", "ceiling")
    if math.isinf(ceiling):
        return Gain("gain not bounded", "No useful bound: the whole step is taken up by this.", "ceiling")
    more = _more(ceiling)
    return Gain(
        f"at most {more} steps/s", f"At most {more} steps a second. This is a bound, not a prediction.", "ceiling"
    )


def _prediction(finding: FindingRow, predicted: dict[str, float], summary: Summary) -> Gain:
    step = summary.job.step_time_us
    change = step / predicted["mid"] - 1
    more = _more(change)
    how = {"measured": "Measured", "replayed": "Predicted by replaying the recorded step"}.get(
        finding.obtained, "Predicted"
    )
    span = ""
    if known(predicted.get("low")) and known(predicted.get("high")):
        span = f" (between {duration(predicted['low'])} and {duration(predicted['high'])})"
    full = (
        f"{how}: {duration(predicted['mid'])} a step{span} instead of {duration(step)}, that is {more} steps a second."
    )
    if known(predicted.get("high")) and predicted["mid"] < step <= predicted["high"]:
        full += " At the range's upper end it brings nothing."
    error = summary.replay.error
    if finding.obtained == "replayed" and error is not None and known(error):
        full += f" Replaying the unchanged step is off by {share(abs(error))}."
    if finding.ceiling is not None and known(finding.ceiling) and _more(finding.ceiling) != more:
        full += f" Ceiling: {_more(finding.ceiling)}."
    return Gain(f"{'measured' if finding.obtained == 'measured' else 'predicted'} {more} steps/s", full, "prediction")


def _more(change: float) -> str:
    """A relative change of the rate: ``25% more``; from 100% also as a factor."""
    if change < 0:
        return f"{share(-change)} fewer"
    factor = f" ({significant(1 + change)}×)" if change >= 1 else ""
    return f"{share(change)} more{factor}"


def _evidence(finding: FindingRow) -> list[EvidenceLine]:
    return [EvidenceLine(row.what, measure(row.value, row.unit), _ranks(row.ranks)) for row in finding.evidence]


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {rank_list(ranks)}" if ranks else ""


def plan_sentence(summary: Summary) -> str | None:
    """What all changes that can be replayed bring together; None where there is no such plan."""
    plan = summary.plan
    if plan is None:
        return None
    predicted, step = plan.predicted_step_us, summary.job.step_time_us
    return (
        f"All {len(plan.whatif)} settings together, in one replay: {duration(predicted['mid'])} a step "
        f"(between {duration(predicted['low'])} and {duration(predicted['high'])}), "
        f"{_more(step / predicted['mid'] - 1)} steps a second. Savings overlap, so they are not added."
    )
