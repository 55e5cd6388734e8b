"""A job as a flat dict of numbers with names that stay, for experiment trackers and tables of runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from perfscope.analyzers.compare.metrics import CATEGORY_METRICS, METRICS, Metric
from perfscope.frozen import dataclass
from perfscope.results.budget import SEVERITIES
from perfscope.results.rows import StragglerRow
from perfscope.results.summary import Summary


@dataclass(frozen=True)
class FlatNumber:
    """One entry; ``value`` is None where the recording lacks it."""

    name: str
    meaning: str
    value: Callable[[Summary], float | None]


_SUFFIXES: Final = {"us": "_us", "bytes": "_bytes"}
"""Unit of a metric -> what its name ends in; shares are 0 to 1."""


def _of_metric(metric: Metric, folder: str = "") -> FlatNumber:
    return FlatNumber(f"{folder}{metric.name}{_SUFFIXES.get(metric.unit, '')}", metric.meaning, metric.value)


def _worst(summary: Summary) -> StragglerRow | None:
    return max(summary.stragglers, key=lambda row: row.lost_us, default=None)


def _straggler_rank(summary: Summary) -> float | None:
    worst = _worst(summary)
    return worst.rank if worst is not None else None


def _severe(severity: str) -> Callable[[Summary], float]:
    return lambda summary: sum(str(finding.severity) == severity for finding in summary.findings)


def _best_speedup(summary: Summary) -> float | None:
    gains = [finding.gain(summary.job.step_us) for finding in summary.findings if finding.predicted_step_us is not None]
    return max((1 + gain for gain in gains if gain is not None), default=None)


def _plan_speedup(summary: Summary) -> float | None:
    if summary.plan is None or not summary.plan.predicted_step_us.mid:
        return None
    return summary.job.step_us / summary.plan.predicted_step_us.mid


def _of_history(field: str) -> Callable[[Summary], float | None]:
    """The largest of any rank."""
    return lambda summary: (
        max((getattr(row, field) for row in summary.history.ranks), default=None) if summary.history else None
    )


FLAT: Final[tuple[FlatNumber, ...]] = (
    FlatNumber("ranks", "ranks in the recording", lambda summary: len(summary.job.ranks)),
    FlatNumber("world_size", "ranks of the job", lambda summary: summary.job.world_size),
    FlatNumber("steps", "used steps", lambda summary: len(summary.job.steps)),
    FlatNumber("healthy", "1 where nothing limits the job, else 0", lambda summary: float(summary.verdict.healthy)),
    *map(_of_metric, METRICS),
    FlatNumber(
        "unprofiled_step_time_us", "mean unprofiled step, slowest rank", lambda summary: summary.job.unprofiled_step_us
    ),
    FlatNumber("profiler_overhead", "median profiled / unprofiled step", lambda summary: summary.job.perturbation),
    FlatNumber("replay_error", "replayed / measured step - 1, without a change", lambda summary: summary.replay.error),
    FlatNumber("stragglers", "stragglers found", lambda summary: len(summary.stragglers)),
    FlatNumber("straggler_rank", "the worst straggler", _straggler_rank),
    FlatNumber("findings", "findings, those that cost nothing too", lambda summary: len(summary.findings)),
    *(
        FlatNumber(f"findings_{severity}", f"findings of severity {severity}", _severe(severity))
        for severity in SEVERITIES
    ),
    FlatNumber("best_speedup", "largest predicted speedup of one finding: step time before / after", _best_speedup),
    FlatNumber("plan_speedup", "predicted speedup of all changes that fit together", _plan_speedup),
    *(_of_metric(metric, "share/") for metric in CATEGORY_METRICS),
    FlatNumber("run/steps", "steps of the history, of the rank with most", _of_history("steps")),
    FlatNumber("run/median_step_us", "median step of the whole run, slowest rank", _of_history("median_us")),
    FlatNumber("run/p99_step_us", "99th percentile of the whole run's steps, slowest rank", _of_history("p99_us")),
    FlatNumber(
        "run/outlier_steps",
        "steps of 1.5 times their neighbors' median, of the rank with most",
        _of_history("outlier_steps"),
    ),
    FlatNumber(
        "cost_per_day",
        "cost of all devices, in the currency given",
        lambda summary: summary.cost.per_day if summary.cost else None,
    ),
)
"""Every entry there can be. Names are a promise: programs rely on them."""


def flat(summary: Summary, prefix: str = "") -> dict[str, float]:
    """The numbers that the recording has, as ``prefix`` and name -> value."""
    values = {f"{prefix}{number.name}": number.value(summary) for number in FLAT}
    return {name: float(value) for name, value in values.items() if value is not None}
