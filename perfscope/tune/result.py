"""The result of ``perfscope tune``: as values, as JSON (``tune.json``) and as text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from perfscope._version import __version__
from perfscope.analyzers.whatif.predict import WhatIfAnswer
from perfscope.frozen import dataclass
from perfscope.tune.candidates import Candidate, shown
from perfscope.tune.document import SCHEMA
from perfscope.tune.search import Decision, SearchOutcome, Trial

RESULT_FILE: Final = "tune.json"


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a search, with all that a report needs."""

    outcome: SearchOutcome
    left: tuple[tuple[Candidate, str], ...]
    """Candidates that were left out, and why."""
    together: WhatIfAnswer | None
    """Predicted step with all changes kept; None where none is, or one of them cannot be predicted."""
    keep: tuple[str, ...]
    """The lines that make it permanent."""
    command: tuple[str, ...]
    headline: str = ""

    @property
    def baseline_ns(self) -> float:
        """The unchanged job's step."""
        return self.outcome.drift.step_ns

    @property
    def kept_ns(self) -> float | None:
        """The step with all changes kept, as measured the second time; None where none is kept."""
        again = self.outcome.confirmed
        if not self.outcome.kept or again is None or again.gain is None:
            return None
        return self.baseline_ns * (1 - again.gain.share)


def as_json(result: Result) -> dict[str, Any]:
    """As ``document.Tune`` describes it."""
    outcome = result.outcome
    return {
        "schema": SCHEMA,
        "perfscope_version": __version__,
        "command": list(result.command),
        "recording": {"headline": result.headline},
        "baseline": {
            "step_us": result.baseline_ns / 1e3,
            "noise": outcome.drift.noise,
            "runs_us": [each.step_ns / 1e3 for each in outcome.baselines],
        },
        "trials": [
            {
                "changes": {each.name: each.new for each in trial.changes},
                "step_us": None if trial.measurement is None else trial.measurement.step_ns / 1e3,
                "steps": None if trial.measurement is None else trial.measurement.steps,
                "gain": None if trial.gain is None else trial.gain.share,
                "noise": None if trial.gain is None else trial.gain.noise,
                "failed": trial.failed or None,
            }
            for trial in outcome.trials
        ],
        "settings": [
            *(_decision(each, result.baseline_ns) for each in outcome.decisions),
            *({**_candidate(each, result.baseline_ns), "kept": False, "why": why} for each, why in result.left),
        ],
        "kept": {
            "settings": {each.name: each.new for each in outcome.kept},
            "predicted_step_us": _predicted(result.together, result.baseline_ns),
            "measured_step_us": None if result.kept_ns is None else result.kept_ns / 1e3,
            "permanent": list(result.keep),
        },
        "stopped": outcome.stopped or None,
    }


def _decision(decision: Decision, baseline_ns: float) -> dict[str, Any]:
    measured_ns = _measured_ns(decision, baseline_ns)
    return {
        **_candidate(decision.candidate, baseline_ns),
        "measured_step_us": None if measured_ns is None else measured_ns / 1e3,
        "kept": decision.kept,
        "why": decision.why,
    }


def _candidate(candidate: Candidate, baseline_ns: float) -> dict[str, Any]:
    return {
        "setting": candidate.name,
        "from": candidate.old,
        "to": candidate.new,
        "reason": candidate.why,
        "changes_numerics": candidate.numerics,
        "predicted_step_us": _predicted(candidate.predicted, baseline_ns),
        "measured_step_us": None,
    }


def _predicted(predicted: WhatIfAnswer | None, baseline_ns: float) -> Mapping[str, float] | None:
    if predicted is None:
        return None
    return {
        name: ns / 1e3 for name, ns in zip(("low", "mid", "high"), predicted.where_step_takes(baseline_ns), strict=True)
    }


def _measured_ns(decision: Decision, baseline_ns: float) -> float | None:
    """The trial's step at the machine's mean pace, which the unchanged job's runs show; None where it was not tried."""
    gain = decision.trial.gain if decision.trial is not None else None
    return None if gain is None else baseline_ns * (1 - gain.share)


def as_text(result: Result) -> str:
    """The table of settings, what is kept, and how to make it permanent."""
    outcome = result.outcome
    lines = [
        _baseline(result),
        "",
        *_table(outcome.decisions, result.baseline_ns),
        *(f"not tried: {each.text} ({why})" for each, why in result.left),
        "",
        *_verdict(result),
    ]
    return "\n".join(lines) + "\n"


def _baseline(result: Result) -> str:
    outcome = result.outcome
    runs, noise = len(outcome.baselines), outcome.drift.noise
    return f"unchanged step {_ms(result.baseline_ns)} ms ({runs} runs, noise {noise:.1%}); {len(outcome.trials)} trials"


_UNSTEADY: Final = 0.05
"""From this difference between unchanged runs on, the text says what to do: it hides smaller gains."""

_HEAD: Final = ("setting", "from", "to", "predicted ms", "measured ms", "change", "")


def _table(decisions: Sequence[Decision], baseline_ns: float) -> list[str]:
    rows = [_HEAD, *(_row(each, baseline_ns) for each in decisions)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_HEAD))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(decision: Decision, baseline_ns: float) -> tuple[str, ...]:
    candidate, took_ns = decision.candidate, _measured_ns(decision, baseline_ns)
    predicted = "" if candidate.predicted is None else _range(candidate.predicted, baseline_ns)
    took = "" if took_ns is None else _ms(took_ns)
    change = _change(decision.trial)
    verdict = f"kept: {decision.why}" if decision.kept else decision.why
    return candidate.name, shown(candidate.old), shown(candidate.new), predicted, took, change, verdict


def _change(trial: Trial | None) -> str:
    """The change of the step time in a trial, with its noise; empty where it was not measured."""
    gain = trial.gain if trial is not None else None
    return "" if gain is None else f"{-gain.share:+.1%} ±{gain.noise:.1%}"


def _verdict(result: Result) -> list[str]:
    outcome = result.outcome
    stopped = [f"Stopped early: {outcome.stopped}."] if outcome.stopped else []
    again = outcome.confirmed
    if not outcome.kept or again is None or again.gain is None or result.kept_ns is None:
        return [
            *stopped,
            "No change is kept: none saved more than noise in both measurements.",
            *_unsteady(outcome.drift.noise),
        ]
    predicted = "" if result.together is None else f"; predicted {_range(result.together, result.baseline_ns)}"
    settings = " ".join(each.text for each in outcome.kept)
    return [
        *stopped,
        f"With {settings}: {_ms(result.kept_ns)} ms, measured again ({_change(again)}{predicted}).",
        "Your code was not changed. To make these settings permanent, write:",
        *(f"    {line}" for line in result.keep),
    ]


def _unsteady(noise: float) -> list[str]:
    """What to do where noise of the machine hides gains."""
    if noise < _UNSTEADY:
        return []
    return [
        f"Runs of the unchanged job differ by {noise:.0%}, which hides gains: use a quieter machine or more --steps."
    ]


def _range(predicted: WhatIfAnswer, baseline_ns: float) -> str:
    low, _, high = predicted.where_step_takes(baseline_ns)
    return f"{_ms(low)} .. {_ms(high)}"


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.2f}" if ns < 1e8 else f"{ns / 1e6:.0f}"
