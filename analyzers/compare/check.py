"""``perfscope.check``: checks a job against the limits of a budget and against a baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from perfscope._version import __version__
from perfscope.analyzers.compare.budget_file import NUMBERS, TOKENS, read_budget
from perfscope.analyzers.compare.compare import Recording, load
from perfscope.analyzers.compare.metrics import Metric, is_significant
from perfscope.analyzers.compare.noise import FLOOR, step_change
from perfscope.errors import UnusableInput
from perfscope.results.budget import (
    FAILED,
    PASSED,
    SEVERITIES,
    SKIPPED,
    UNKNOWN,
    Budget,
    Check,
    CheckRow,
    Limit,
    Quantity,
)
from perfscope.results.comparison import StepChange
from perfscope.results.findings import plain
from perfscope.results.summary import Summary

_WORSE: Final = {"lower": 1.0, "higher": -1.0}


def check(
    recording: Recording,
    budget: Budget | str | Path,
    *,
    baselines: Sequence[Recording] = (),
    noise: float = FLOOR,
    workers: int | None = None,
) -> Check:
    """Check a recording (or its summary) against a budget, given as a file or as a value.

    Regressions are measured from the first of ``baselines``; what several of them differ by is noise. ``noise`` is the
    share of the step below which no difference is significant.

    Raises UnusableInput where the budget or a recording is unusable, or a regression has no baseline.
    """
    wanted = budget if isinstance(budget, Budget) else read_budget(budget)
    regressions = [limit.metric for limit in wanted.limits if limit.regression is not None]
    if regressions and not baselines:
        raise UnusableInput(
            f"{wanted.source or 'the budget'}: [{regressions[0]}] regression needs a baseline: give --baseline with "
            "a recording or its summary (perfscope analyze TRACES --json FILE)"
        )
    run = load(recording, workers=workers)
    earlier = [load(each, workers=workers) for each in baselines]
    now, baseline = run.summary, earlier[0].summary if earlier else None
    step = step_change(baseline, now, [other.summary for other in earlier[1:]], noise) if baseline is not None else None
    rows = [row for limit in wanted.limits for row in _rows(limit, now, baseline, step)]
    return Check(
        source=run.name,
        budget=wanted.source,
        baseline=", ".join(other.name for other in earlier) or None,
        headline=now.verdict.headline,
        rows=(*rows, *_findings(wanted, now)),
        notes=tuple(_notes(now)),
        perfscope_version=__version__,
    )


def _rows(limit: Limit, now: Summary, baseline: Summary | None, step: StepChange | None) -> Iterator[CheckRow]:
    metric = NUMBERS[limit.metric]
    for bound, quantity in (("at most", limit.at_most), ("at least", limit.at_least)):
        if quantity is not None:
            yield _absolute(limit, metric, bound, quantity, now)
    if limit.regression is not None and baseline is not None and step is not None:
        yield _regression(limit, metric, limit.regression, now, baseline, step)


def _absolute(limit: Limit, metric: Metric, bound: str, quantity: Quantity, now: Summary) -> CheckRow:
    measured = _measured(limit, metric, now, quantity.unit)
    name = f"{metric.name} {bound}"
    if measured is None:
        return _absent(name, limit, metric, quantity.unit, quantity.value)
    failed = measured > quantity.value if bound == "at most" else measured < quantity.value
    side = "above" if bound == "at most" else "below"
    return CheckRow(
        name=name,
        status=FAILED if failed else PASSED,
        unit=quantity.unit,
        measured=measured,
        limit=quantity.value,
        message=f"{metric.meaning}: {side if failed else 'within'} the limit",
    )


def _regression(
    limit: Limit, metric: Metric, allowed: Quantity, now: Summary, baseline: Summary, step: StepChange
) -> CheckRow:
    name = f"{metric.name} regression"
    measured = _measured(limit, metric, now, metric.unit)
    before = _measured(limit, metric, baseline, metric.unit)
    if measured is None or before is None:
        return _absent(name, limit, metric, metric.unit, None)
    worse = _WORSE[metric.better] * (measured - before)
    margin = allowed.value * abs(before) if allowed.unit == "percent" else allowed.value
    status, message = _judged(worse, margin, is_significant(metric, baseline, now, step))
    return CheckRow(
        name=name,
        status=status,
        unit=metric.unit,
        measured=measured,
        limit=before + _WORSE[metric.better] * margin,
        baseline=before,
        message=f"{metric.meaning}: {message}",
    )


def _judged(worse: float, margin: float, significant: bool | None) -> tuple[str, str]:
    if worse <= 0:
        return PASSED, "no worse than the baseline"
    if worse <= margin:
        return PASSED, "worse than the baseline, but within the allowed regression"
    if significant is None:
        return UNKNOWN, "worse than allowed, but too few steps to judge: record at least 5 steps of each"
    if not significant:
        return PASSED, "worse than allowed, but within noise: record more steps to be sure"
    return FAILED, "significantly worse than the baseline, by more than is allowed"


def _measured(limit: Limit, metric: Metric, summary: Summary, unit: str) -> float | None:
    """The number in the unit of the limit: a share of the step may be limited as a time per step, and vice versa."""
    step = summary.job.step_time_us
    if metric is TOKENS:
        return limit.per_step / step * 1e6 if limit.per_step and step > 0 else None
    value = metric.value(summary)
    if value is None or unit == metric.unit:
        return value
    if unit == "us":
        rows = summary.time_breakdown
        return value * (sum(row.step_time_us for row in rows) / len(rows) if rows else step)
    return value / step if step > 0 else None


def _absent(name: str, limit: Limit, metric: Metric, unit: str, bound: float | None) -> CheckRow:
    remedy = "" if limit.optional else "; if that is expected, set optional = true"
    return CheckRow(
        name=name,
        status=SKIPPED if limit.optional else UNKNOWN,
        unit=unit,
        limit=bound,
        message=f"{metric.meaning}: not known ({metric.why_absent}){remedy}",
    )


def _findings(budget: Budget, now: Summary) -> Iterator[CheckRow]:
    """A row for each finding that is severe enough; a single row where there is none."""
    if budget.fail_on is None:
        return
    counted = SEVERITIES[: SEVERITIES.index(budget.fail_on) + 1]
    severe = [finding for finding in now.findings if finding.severity in counted and finding.rule not in budget.ignore]
    for finding in severe:
        yield CheckRow(
            name=f"finding {finding.rule}",
            status=FAILED,
            message=f"{finding.title} ({finding.severity} severity). Change: {plain(finding.action.how)}",
        )
    if not severe:
        yield CheckRow(
            name="findings",
            status=PASSED if now.time_breakdown else UNKNOWN,
            message=f"no finding of {budget.fail_on} severity or above"
            if now.time_breakdown
            else "no rank has a time breakdown, so no rule could run",
        )


def _notes(now: Summary) -> Iterator[str]:
    if now.job.missing_ranks or now.job.failures:
        missing = len(now.job.missing_ranks) + len(now.job.failures)
        yield f"{missing} ranks or files are missing in the recording: the numbers are those of the others."
    if now.job.perturbation is not None and now.job.perturbation >= 1.1:
        yield f"Profiler overhead: {now.job.perturbation:.2f}x. The limits are checked against the profiled steps."
