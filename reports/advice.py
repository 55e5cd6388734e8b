"""Findings in words: what to change, and how honestly its worth can be stated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from perfscope.reports.format import duration, known, measure, rank_list, share, significant
from perfscope.summary import FindingRow, Summary


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
class Card:
    """One finding as the page shows it."""

    number: int
    finding: FindingRow
    gain: Gain
    evidence: tuple[EvidenceLine, ...]

    @property
    def anchor(self) -> str:
        """Id of the card on the page."""
        return f"finding-{self.number}"


def cards(summary: Summary) -> tuple[Card, ...]:
    """The findings, in their order, numbered from 1."""
    return tuple(
        Card(number, finding, gain(finding, summary), tuple(_evidence(finding)))
        for number, finding in enumerate(summary.findings, start=1)
    )


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
    error = summary.replay.error
    if finding.obtained == "replayed" and error is not None and known(error):
        full += f" Replaying the unchanged step is off by {share(abs(error))}."
    if finding.ceiling is not None and known(finding.ceiling):
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
