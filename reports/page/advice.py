"""Findings in words: what to change, and what speedup is measured, predicted or possible at most."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Final

from perfscope.frozen import dataclass
from perfscope.results.accuracy import accuracy_in_words
from perfscope.results.cost import Cost, SavingRow
from perfscope.results.findings import Block, Finding, Prediction, blocks
from perfscope.results.summary import Summary
from perfscope.text import (
    ABSENT,
    byte_size,
    duration,
    factor,
    known,
    of_recording,
    percent,
    ranks_in_words,
    significant,
)

_AT_BOUND: Final = 0.97
"""A range that ends this close to a bound does not contradict it."""


@dataclass(frozen=True)
class Speedup:
    """The speedup by a change."""

    short: str
    """A few words, for the list of findings."""
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
    finding: Finding
    speedup: Speedup
    evidence: tuple[EvidenceLine, ...]
    lengths: tuple[Length, ...]
    """The step now, predicted and at best; empty where no gain is stated."""
    command: str
    """The command that replays the change; empty where it cannot be replayed."""
    saving: str
    """In money; empty where no price was given."""

    @property
    def how(self) -> tuple[Block, ...]:
        """What to do, line by line, and what to type, whole."""
        return tuple(
            Block(block.language, line)
            for block in blocks(self.finding.action.how)
            for line in (block.text,) * bool(block.language) or block.text.splitlines()
        )

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
            speedup_of(finding, summary),
            tuple(_evidence(finding)),
            lengths(finding, summary),
            whatif_command(finding.whatif, summary) if finding.obtained == "replayed" else "",
            _saving(summary, number - 1),
        )
        for number, finding in enumerate(summary.findings, start=1)
    )


def lengths(finding: Finding, summary: Summary) -> tuple[Length, ...]:
    """The step now, as predicted with the change, and at best (its ceiling); empty where no gain is stated."""
    step, predicted = summary.job.step_us, finding.predicted_step_us
    bars, written = [], ""
    longest = step
    if predicted is not None:
        low, mid, high = predicted.low, predicted.mid, predicted.high
        longest = max(step, high)
        written = duration(mid)
        span = f" ({duration(low)} to {duration(high)})" if duration(low) != duration(high) else ""
        place = (100 * low / longest, 100 * high / longest) if longest > 0 else (None, None)
        label = "Measured" if finding.obtained == "measured" else "Predicted"
        bars.append((label, "prediction", written + span, mid, "predicted", place))
    if finding.ceiling is not None and known(finding.ceiling):
        best = step / (1 + finding.ceiling)
        if duration(best) != written:  # not the same number twice
            bars.append(("At best", "ceiling", duration(best), best, "ceiling", (None, None)))
    if not bars or not longest > 0:
        return ()
    bars.insert(0, ("Now", "step_time", duration(step), step, "now", (None, None)))
    return tuple(
        Length(label, definition, text, 100 * us / longest, kind, *place)
        for label, definition, text, us, kind, place in bars
    )


def whatif_command(settings: Mapping[str, str], summary: Summary) -> str:
    """``perfscope whatif`` of the capture with these settings, as one would type it; empty without settings."""
    changes = (f" --set {shlex.quote(f'{name}={value}')}" for name, value in settings.items())
    return f"perfscope whatif {recording(summary)}{''.join(changes)}" if settings else ""


def recording(summary: Summary) -> str:
    """What was analyzed, as an argument of other commands."""
    capture = "" if summary.capture is None else f" --capture {summary.capture}"
    return f"{shlex.quote(summary.source or 'TRACES')}{capture}"


def _saving(summary: Summary, finding: int) -> str:
    cost = summary.cost
    rows = (saving(row, cost) for row in cost.savings if row.finding == finding) if cost is not None else iter(())
    return next(rows, "")


def speedup_of(finding: Finding, summary: Summary) -> Speedup:
    """The speedup by one change: a prediction where there is one, else its ceiling, named as such."""
    predicted = finding.predicted_step_us
    if predicted is not None and predicted.mid > 0:
        return _prediction(finding, predicted, summary)
    ceiling = finding.ceiling
    if ceiling is None or math.isnan(ceiling):
        return Speedup("no speedup stated", "No speedup is given: this change does not save time.", "ceiling")
    if math.isinf(ceiling):
        return Speedup("speedup not bounded", "There is no useful bound: this takes the whole step.", "ceiling")
    most = factor(1 + ceiling)
    return Speedup(f"at most {most} faster", f"At most {most} faster: a bound, not a prediction.", "ceiling")


def _prediction(finding: Finding, predicted: Prediction, summary: Summary) -> Speedup:
    step = summary.job.step_us
    how = "Measured" if finding.obtained == "measured" else "Predicted"
    speedup = predicted.speedup_of(step)
    full = (
        f"{how} speedup: {speedup}. {_per_step(predicted)} instead of {duration(step)}"
        f"{', by replay of the recorded step' if finding.obtained == 'replayed' else ''}"
        f"{', without the profiler' if known(summary.job.unprofiled_step_us) else ''}."
    )
    if predicted.mid < step <= predicted.high:
        full += " At the upper end of the range nothing is gained."
    if finding.obtained == "replayed" and finding.whatif:
        full += f" {accuracy_in_words(finding.whatif)}"
    # What bounds the middle alone is no bound of the range that is stated.
    ceiling, beyond = finding.ceiling, (1 + (finding.ceiling or 0.0)) * predicted.low < _AT_BOUND * step
    if ceiling is not None and known(ceiling) and not beyond and factor(1 + ceiling) != factor(step / predicted.mid):
        full += f" Upper bound: {factor(1 + ceiling)}."
    full = of_recording(full) if summary.is_one_window else full
    return Speedup(f"{how.lower()} {speedup} faster", full, "prediction")


def _per_step(predicted: Prediction) -> str:
    """A predicted step time with its range: ``41.2 ms per step (40.1 ms to 43.0 ms)``."""
    return f"{duration(predicted.mid)} per step ({duration(predicted.low)} to {duration(predicted.high)})"


def _evidence(finding: Finding) -> list[EvidenceLine]:
    return [
        EvidenceLine(row.what, measure(row.value, row.unit), ranks_in_words(row.ranks) if row.ranks else "")
        for row in finding.evidence
    ]


def plan_sentence(summary: Summary) -> str | None:
    """The speedup by all changes that can be replayed together; None where there is no such plan."""
    plan = summary.plan
    if plan is None:
        return None
    speedup = plan.predicted_step_us.speedup_of(summary.job.step_us)
    return (
        f"All {len(plan.whatif)} settings in one replay: predicted speedup {speedup}, "
        f"{_per_step(plan.predicted_step_us)}. The speedups above overlap and do not add up."
    )


def measure(value: float, unit: str) -> str:
    """A number of evidence in the unit that the rule gave it."""
    if not math.isfinite(value):
        return ABSENT
    factors = {"ns": 1e-3, "us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}
    if unit in factors:
        return duration(value * factors[unit])
    if unit in {"share", "fraction"}:
        return percent(value)
    if unit in {"bytes", "B"}:
        return byte_size(value)
    if unit in {"ratio", "x", "×"}:
        return factor(value)
    number = f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else significant(value)
    return f"{number} {unit}".strip()


def amount(value: float, cost: Cost) -> str:
    """An amount of the cost's currency: ``1,200 USD``, ``0.0135 EUR``."""
    return f"{significant(value)} {cost.currency}"


def saving(row: SavingRow, cost: Cost) -> str:
    """What one change saves: ``40.5 USD per day (38.2 to 41.0)``, ``at most 120 USD per day``."""
    per_day = f"{amount(row.per_day, cost)} per day"
    if row.bounded:
        return f"at most {per_day}"
    if row.per_day_low is None or row.per_day_high is None:
        return per_day
    return f"{per_day} ({significant(row.per_day_low)} to {significant(row.per_day_high)})"
