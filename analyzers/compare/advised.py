"""Findings that are gone, new or still there; and predicted changes that were made: predicted and measured effect."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

from perfscope.analyzers.compare.settings import FOLLOWS, settings
from perfscope.frozen import dataclass
from perfscope.results.comparison import FindingChange, PredictionCheck, SettingChange, StepChange
from perfscope.results.findings import Finding, Predict, Prediction
from perfscope.results.summary import Summary

AT_PACE: Final = 0.05
"""Straggler cost, as a share of the step, below which a rank is at its peers' pace: the threshold of the rule."""


_RECORDED_AS: Final = {"ddp.no_sync": "gradient_accumulation.no_sync"}
"""Setting of ``perfscope whatif`` -> its name in recordings, where that is another."""


def finding_changes(baseline: Summary, candidate: Summary) -> tuple[FindingChange, ...]:
    """By rule, and stragglers by their ranks: first those that are gone, then the new ones, then the rest; empty where
    a recording has no trace.
    """
    if not baseline.time_breakdown or not candidate.time_breakdown:
        return ()
    first = {_about(finding): finding for finding in baseline.findings}
    second = {_about(finding): finding for finding in candidate.findings}
    changes = []
    for about in {**first, **second}:
        old, new = first.get(about), second.get(about)
        shown = new or old
        assert shown is not None
        changes.append(
            FindingChange(
                rule=shown.rule,
                status="gone" if new is None else "new" if old is None else "still",
                title=shown.title,
                baseline_severity=old.severity if old else None,
                candidate_severity=new.severity if new else None,
            )
        )
    order = {"gone": 0, "new": 1, "still": 2}
    return tuple(sorted(changes, key=lambda change: order[change.status]))


def _about(finding: Finding) -> tuple[str, tuple[int, ...]]:
    """What makes two findings the same one: another straggler is another finding."""
    return finding.rule, finding.straggling


def prediction_checks(
    baseline: Summary,
    candidate: Summary,
    step: StepChange,
    changed: tuple[SettingChange, ...],
    predict: Predict | None = None,
) -> tuple[PredictionCheck, ...]:
    """Predicted and measured effect of the changes that findings advised, and with ``predict`` of any other change."""
    profiled = baseline.job.step_time_us / baseline.job.step_us if baseline.job.step_us else 1.0
    trial = _Trial(replayable(baseline), replayable(candidate), step, changed, profiled)
    advised = [finding for finding in baseline.findings if any(trial.differs(name) for name in finding.whatif)]
    if advised or predict is None:
        return tuple(trial.of_finding(finding, predict) for finding in advised)
    others = {name: value for name, value in trial.candidate.items() if trial.baseline.get(name, value) != value}
    predicted = predict(others) if others else None
    return (trial.check(None, others, predicted),) if predicted is not None else ()


@dataclass(frozen=True)
class _Trial:
    """A change that was made: the replayable settings of both runs, and what came of it."""

    baseline: dict[str, str]
    candidate: dict[str, str]
    step: StepChange
    changed: tuple[SettingChange, ...]
    profiled: float
    """Recorded over predicted steps: those are compared as they were recorded, and predicted without the profiler."""

    def differs(self, name: str) -> bool:
        return name in self.candidate and _plain(self.baseline.get(name)) != _plain(self.candidate[name])

    def of_finding(self, finding: Finding, predict: Predict | None) -> PredictionCheck:
        others = {
            name: self.candidate[name]
            for name, value in finding.whatif.items()
            if name in self.candidate and _plain(self.candidate[name]) != _plain(value)
        }
        predicted = finding.predicted_step_us
        if others:
            # The finding's prediction is for another value.
            predicted = predict({**finding.whatif, **others}) if predict is not None else None
        return self.check(finding, dict(finding.whatif), predicted)

    def check(self, finding: Finding | None, settings: dict[str, str], predicted: Prediction | None) -> PredictionCheck:
        step = self.step
        # Predictions are of the mean of all steps.
        predicted = predicted.times(self.profiled) if predicted else None
        saving = step.baseline_mean_us - predicted.mid if predicted else None
        measured = step.baseline_mean_us - step.candidate_mean_us
        as_advised = finding is not None and all(
            _plain(self.candidate.get(name)) == _plain(value) for name, value in settings.items()
        )
        return PredictionCheck(
            rule=finding.rule if finding else "",
            title=finding.title if finding else "",
            settings=settings,
            baseline={name: self.baseline.get(name, "not known") for name in settings},
            candidate={name: self.candidate.get(name, "not known") for name in settings},
            as_advised=as_advised,
            predicted_us=predicted,
            ceiling=finding.ceiling if finding and as_advised and math.isfinite(finding.ceiling or 0.0) else None,
            measured_us=step.candidate_mean_us,
            verdict=_verdict(predicted, step),
            realised=measured / saving if saving and abs(saving) > (step.noise_us or 0.0) else None,
            also_changed=tuple(_others(self.changed, settings)),
        )


def replayable(summary: Summary) -> dict[str, str]:
    """Present values of the settings that ``perfscope whatif`` can change, as far as they are recorded."""
    known = settings(summary)
    names = ("dataloader.num_workers", "ddp.bucket_cap_mb")
    present: dict[str, str] = {name: known[name] for name in names if name in known}
    accumulation = summary.job.settings.get("gradient_accumulation", {})
    if "no_sync" in accumulation:
        present["ddp.no_sync"] = "true" if accumulation["no_sync"] else "false"
    named = summary.job.strategies
    stages = [name.removeprefix("zero") for name in named if name.startswith("zero")]
    if stages or "ddp" in named:
        present["zero.stage"] = stages[0] if stages else "0"
    if summary.pipeline is not None and summary.pipeline.microbatches is not None:
        present["pipeline.microbatches"] = str(summary.pipeline.microbatches)
    slow = {
        rank for row in summary.stragglers if row.lost_us >= AT_PACE * summary.job.step_time_us for rank in row.members
    }
    # Without a time breakdown, as in a recording of step times only, stragglers are not known.
    if summary.time_breakdown:
        present.update({f"rank.{rank}": "slow" if rank in slow else "peers" for rank in summary.job.ranks})
        present["ranks.work"] = "uneven" if slow else "even"
    return present


def _plain(value: str | None) -> str | None:
    """A setting's value, with numbers as whatif writes them: 25.0 is 25."""
    try:
        return value if value is None else f"{float(value):g}"
    except ValueError:
        return value


def _verdict(predicted: Prediction | None, step: StepChange) -> str:
    """Is the measured step time in the predicted range, widened by the noise?"""
    if predicted is None or step.noise_us is None or step.verdict == "unknown" or step.confirmed is False:
        return "not judged"
    is_same = step.verdict == "same"
    if is_same and (step.uncertain or step.unprofiled_differ):
        return "not judged"
    noise = step.noise_us
    effect = step.baseline_mean_us - predicted.mid
    if predicted.low - noise <= step.candidate_mean_us <= predicted.high + noise:
        # A wide range alone does not confirm an effect that is within noise.
        return "as predicted" if not is_same or abs(effect) <= noise else "no effect"
    if is_same:
        return "no effect"
    if step.candidate_mean_us < predicted.low:
        return "faster than predicted"
    return "slower than baseline" if step.verdict == "slower" and effect > 0 else "slower than predicted"


def _others(changed: tuple[SettingChange, ...], advised: Mapping[str, str]) -> Iterator[str]:
    """Names of the other changes that may matter: settings and the job, not what follows from a setting."""
    same = {*advised, *(_RECORDED_AS[name] for name in advised if name in _RECORDED_AS)}
    for change in changed:
        follows = change.name in same or change.name in FOLLOWS or change.about == "command"
        if not follows and change.name != "hosts":
            yield change.name
