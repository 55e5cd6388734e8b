"""``perfscope.check``: a job held against a budget, absolutely and against a baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from perfscope._version import __version__
from perfscope.analyzers.difference.budget_file import NUMBERS, TOKENS, read_budget
from perfscope.analyzers.difference.compare import Recording
from perfscope.analyzers.difference.metrics import Metric, is_real
from perfscope.analyzers.difference.noise import FLOOR, step_change
from perfscope.analyzers.difference.runs import Run, load
from perfscope.budget import EXCEEDED, HELD, SEVERITIES, SKIPPED, UNKNOWN, Budget, Check, CheckRow, Limit, Quantity
from perfscope.comparison import StepChange
from perfscope.errors import UnusableInput
from perfscope.summary import Summary

_WORSE: Final = {"lower": 1.0, "higher": -1.0}


def check(
    recording: Recording,
    budget: Budget | str | Path,
    *,
    baselines: Sequence[Recording] = (),
    noise: float = FLOOR,
    workers: int | None = None,
) -> Check:
    """Hold a recording (or its summary) against a budget, given as a file or as a value.

    ``baselines`` are recordings of the job as it was: regressions are measured from the first, and what differs among
    several of them counts as noise. ``noise`` is the share of the step below which no difference is claimed.

    Raises UnusableInput where the budget or a recording is unusable, or a regression has no baseline.
    """
    wanted = budget if isinstance(budget, Budget) else read_budget(budget)
    regressions = [limit.metric for limit in wanted.limits if limit.regression is not None]
    if regressions and not baselines:
        raise UnusableInput(
            f"{wanted.source or 'the budget'}: [{regressions[0]}] regression needs something to compare with: give "
            "--baseline, a recording or the summary of one (perfscope analyze TRACES --json FILE)"
        )
    run = load(recording, workers=workers)
    return check_run(run, wanted, [load(baseline, workers=workers) for baseline in baselines], noise)


def check_run(run: Run, budget: Budget, baselines: Sequence[Run] = (), noise: float = FLOOR) -> Check:
    """The same of runs that are loaded already."""
    now = run.summary
    before = baselines[0].summary if baselines else None
    step = step_change(before, now, [other.summary for other in baselines[1:]], noise) if before is not None else None
    rows = [row for limit in budget.limits for row in _rows(limit, now, before, step)]
    return Check(
        source=run.name,
        budget=budget.source,
        baseline=", ".join(other.name for other in baselines) or None,
        headline=now.verdict.headline,
        rows=(*rows, *_findings(budget, now)),
        notes=tuple(_notes(now)),
        perfscope_version=__version__,
    )


def _rows(limit: Limit, now: Summary, before: Summary | None, step: StepChange | None) -> Iterator[CheckRow]:
    metric = NUMBERS[limit.metric]
    for bound, quantity in (("at most", limit.at_most), ("at least", limit.at_least)):
        if quantity is not None:
            yield _absolute(limit, metric, bound, quantity, now)
    if limit.regression is not None and before is not None and step is not None:
        yield _regression(limit, metric, limit.regression, now, before, step)


def _absolute(limit: Limit, metric: Metric, bound: str, quantity: Quantity, now: Summary) -> CheckRow:
    measured = _measured(limit, metric, now, quantity.unit)
    name = f"{metric.name} {bound}"
    if measured is None:
        return _absent(name, limit, metric, quantity.unit, quantity.value)
    broken = measured > quantity.value if bound == "at most" else measured < quantity.value
    return CheckRow(
        name=name,
        status=EXCEEDED if broken else HELD,
        unit=quantity.unit,
        measured=measured,
        limit=quantity.value,
        baseline=None,
        message=f"{metric.meaning}: {'beyond' if broken else 'within'} the limit",
    )


def _regression(
    limit: Limit, metric: Metric, allowed: Quantity, now: Summary, before: Summary, step: StepChange
) -> CheckRow:
    name = f"{metric.name} regression"
    measured = _measured(limit, metric, now, metric.unit)
    baseline = _measured(limit, metric, before, metric.unit)
    if measured is None or baseline is None:
        return _absent(name, limit, metric, metric.unit, None)
    worse = _WORSE[metric.better] * (measured - baseline)
    margin = allowed.value * abs(baseline) if allowed.unit == "percent" else allowed.value
    status, message = _judged(worse, margin, is_real(metric, before, now, step))
    return CheckRow(
        name=name,
        status=status,
        unit=metric.unit,
        measured=measured,
        limit=baseline + _WORSE[metric.better] * margin,
        baseline=baseline,
        message=f"{metric.meaning}: {message}",
    )


def _judged(worse: float, margin: float, real: bool | None) -> tuple[str, str]:
    if worse <= 0:
        return HELD, "no worse than the baseline"
    if worse <= margin:
        return HELD, "worse than the baseline, as far as is allowed"
    if real is None:
        return UNKNOWN, "worse than allowed, but too few steps to tell it from noise: record at least 5 of each"
    if not real:
        return HELD, "worse than allowed, but within the noise: record more steps to be sure"
    return EXCEEDED, "worse than the baseline by more than is allowed, beyond the noise"


def _measured(limit: Limit, metric: Metric, summary: Summary, unit: str) -> float | None:
    """The number in the unit of the limit: a share of the time may be limited as time a step, and the other way."""
    step = summary.job.step_time_us
    if metric is TOKENS:
        return limit.per_step / step * 1e6 if limit.per_step and step > 0 else None
    value = metric.value(summary)
    if value is None or unit == metric.unit:
        return value
    if unit == "us":
        mean = sum(row.step_time_us for row in summary.accounting) / max(len(summary.accounting), 1)
        return value * mean
    return value / step if step > 0 else None


def _absent(name: str, limit: Limit, metric: Metric, unit: str, bound: float | None) -> CheckRow:
    remedy = "" if limit.optional else "; where that is expected, write optional = true"
    return CheckRow(
        name=name,
        status=SKIPPED if limit.optional else UNKNOWN,
        unit=unit,
        measured=None,
        limit=bound,
        baseline=None,
        message=f"{metric.meaning}: not known, since {metric.why_absent}{remedy}",
    )


def _findings(budget: Budget, now: Summary) -> Iterator[CheckRow]:
    """A row for each finding grave enough; one that says that there is none."""
    if budget.fail_on is None:
        return
    counted = SEVERITIES[: SEVERITIES.index(budget.fail_on) + 1]
    grave = [finding for finding in now.findings if finding.severity in counted and finding.rule not in budget.ignore]
    for finding in grave:
        yield CheckRow(
            name=f"finding {finding.rule}",
            status=EXCEEDED,
            unit="",
            measured=None,
            limit=None,
            baseline=None,
            message=f"{finding.title} ({finding.severity} severity). {finding.action.how}",
        )
    if not grave:
        yield CheckRow(
            name="findings",
            status=HELD if now.accounting else UNKNOWN,
            unit="",
            measured=None,
            limit=None,
            baseline=None,
            message=f"no finding of {budget.fail_on} severity or above"
            if now.accounting
            else "no rank was accounted, so nothing could be found",
        )


def _notes(now: Summary) -> Iterator[str]:
    if now.job.missing_ranks or now.job.failures:
        missing = len(now.job.missing_ranks) + len(now.job.failures)
        yield f"The recording lacks {missing} ranks or files: its numbers are of the others."
    if now.job.perturbation is not None and now.job.perturbation >= 1.1:
        yield f"Profiling slowed the steps: {now.job.perturbation:.2f}×. Limits are held against the profiled steps."
