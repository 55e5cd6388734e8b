"""What ``perfscope tune`` found: as values, as JSON (``tune.json``) and as text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from perfscope._version import __version__
from perfscope.tuning.candidates import Candidate, Predicted, shown
from perfscope.tuning.search import Decision, Outcome

SCHEMA: Final = "perfscope.tune/1"
RESULT_FILE: Final = "tune.json"


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a search, with all that is needed to tell of it."""

    outcome: Outcome
    left: tuple[tuple[Candidate, str], ...]
    """Candidates that were not to be tried, and why."""
    together: Predicted | None
    """What was predicted of all that is kept; None where nothing is, or a part cannot be predicted."""
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
        """The step with all that is kept, as measured the second time; None where nothing is kept."""
        again = self.outcome.confirmed
        if not self.outcome.kept or again is None or again.gain is None:
            return None
        return self.baseline_ns * (1 - again.gain.share)


def as_json(result: Result) -> dict[str, Any]:
    """Times in µs, gains as shares of the step (0.2: a fifth of it saved)."""
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
    trial = decision.trial
    tried = trial is not None and trial.gain is not None
    return {
        **_candidate(decision.candidate, baseline_ns),
        "measured_step_us": _measured_ns(decision, baseline_ns) / 1e3 if tried else None,
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


def _predicted(predicted: Predicted | None, baseline_ns: float) -> Mapping[str, float] | None:
    if predicted is None:
        return None
    return {name: ns / 1e3 for name, ns in zip(("low", "mid", "high"), predicted.unprofiled(baseline_ns), strict=True)}


def _measured_ns(decision: Decision, baseline_ns: float) -> float:
    """The trial's step, at the pace that the machine had in all of the unchanged job's runs."""
    assert decision.trial is not None
    assert decision.trial.gain is not None
    return baseline_ns * (1 - decision.trial.gain.share)


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
"""Difference of unchanged runs from which a user can do something about it: gains below are lost in it."""

_HEAD: Final = ("setting", "from", "to", "predicted ms", "measured ms", "change", "")


def _table(decisions: Sequence[Decision], baseline_ns: float) -> list[str]:
    rows = [_HEAD, *(_row(each, baseline_ns) for each in decisions)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_HEAD))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(decision: Decision, baseline_ns: float) -> tuple[str, ...]:
    candidate, trial = decision.candidate, decision.trial
    told = "" if candidate.predicted is None else _range(candidate.predicted, baseline_ns)
    took = change = ""
    if trial is not None and trial.gain is not None:
        took, change = _ms(_measured_ns(decision, baseline_ns)), f"{-trial.gain.share:+.1%} ±{trial.gain.noise:.1%}"
    verdict = f"kept: {decision.why}" if decision.kept else decision.why
    return candidate.name, shown(candidate.old), shown(candidate.new), told, took, change, verdict


def _verdict(result: Result) -> list[str]:
    outcome = result.outcome
    stopped = [f"Stopped early: {outcome.stopped}."] if outcome.stopped else []
    again = outcome.confirmed
    if not outcome.kept or again is None or again.gain is None or result.kept_ns is None:
        return [*stopped, "Nothing is kept: no change saved more than noise, twice.", *_unsteady(outcome.drift.noise)]
    told = "" if result.together is None else f"; predicted {_range(result.together, result.baseline_ns)}"
    settings = " ".join(each.text for each in outcome.kept)
    change = f"{-again.gain.share:+.1%} ±{again.gain.noise:.1%}"
    return [
        *stopped,
        f"With {settings}: {_ms(result.kept_ns)} ms, measured again ({change}{told}).",
        "Nothing of your code was changed. To keep it, write:",
        *(f"    {line}" for line in result.keep),
    ]


def _unsteady(noise: float) -> list[str]:
    """What to do where gains are lost in the noise of the machine."""
    if noise < _UNSTEADY:
        return []
    return [f"Runs of the unchanged job differ by {noise:.0%}: a quieter machine, or more --steps, tells more."]


def _range(predicted: Predicted, baseline_ns: float) -> str:
    low, _, high = predicted.unprofiled(baseline_ns)
    return f"{_ms(low)} .. {_ms(high)}"


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.2f}" if ns < 1e8 else f"{ns / 1e6:.0f}"
