"""The Summary of a recording without a trace, as ``perfscope run --steps-only`` makes, from step histories alone.

Time breakdown, critical path, communication and utilisation need kernels or operators, and stay empty. The host's
stages do not replace them, because they include waiting for devices and for other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from perfscope._version import __version__
from perfscope.analyzers.history.level import FEWEST_STEPS
from perfscope.recording.job import Job
from perfscope.results.hang import Hang
from perfscope.results.history import EVALUATE_LESS, STAGE_WORDS, History, RankHistory
from perfscope.results.notes import Note, collector_problems, ended, note
from perfscope.results.rows import Failure, JobInfo, Replay, Utilisation, Verdict
from perfscope.results.summary import Summary
from perfscope.text import duration

NOTICEABLE: Final = 0.05
"""Share of the step from which a rank's excess, or data loading, is in the verdict."""
EVALUATES: Final = 0.2
"""Share of the run's time in evaluations from which they are in the verdict, as of those in traces."""
_SHOWN: Final = 0.005
"""The same where nothing else is to be said: of a job without a data loader not that it takes 0 %."""

_NO_TRACE: Final = "No trace was recorded, only step times"


def summarize_steps(job: Job, history: History, failures: tuple[Failure, ...]) -> Summary:
    """A Summary of step histories alone. ``failures``: histories that could not be read."""
    slowest = max(history.ranks, key=lambda row: row.mean_us)
    unread = tuple(Failure(rank=problem.rank, path=str(problem.path), error=problem.error) for problem in job.problems)
    info = untraced_job(
        job,
        tuple(row.rank for row in history.ranks),
        history.missing_ranks,
        (*unread, *failures),
        steps_from=f"only step times were recorded, of steps {slowest.first_step} to {slowest.last_step}",
    )
    info = replace(
        info,
        step_time_us=slowest.mean_us,
        unprofiled_step_us=slowest.median_us,
        hosts=tuple(dict.fromkeys(row.host for row in history.ranks if row.host)),
    )
    verdict = Verdict(
        headline=_headline(history, slowest), healthy=False, first_action=_first_action(job, history, slowest)
    )
    return untraced_summary(job, info, verdict, _NO_TRACE, notes=tuple(_notes(job, history)), history=history)


def untraced_summary(
    job: Job,
    info: JobInfo,
    verdict: Verdict,
    why_absent: str,
    *,
    notes: tuple[Note, ...] = (),
    history: History | None = None,
    hang: Hang | None = None,
) -> Summary:
    """A Summary without all that needs a trace; ``why_absent`` says why there is none."""
    return Summary(
        job=info,
        time_breakdown=(),
        clock=(),
        collectives=(),
        cost_model=(),
        stragglers=(),
        critical_path=None,
        dataloader=(),
        utilisation=Utilisation(
            mfu=None, hfu=None, model_flops_per_step=None, flops_coverage=None, peak_tflops=None, dtype=None,
            causal="full", why_absent=why_absent,
        ),
        memory=(),
        replay=Replay(),
        findings=(),
        verdict=verdict,
        notes=notes,
        step_timeline=(),
        history=history,
        hang=hang,
        perfscope_version=__version__,
        source=job.shown_path,
    )  # fmt: skip


def untraced_job(
    job: Job, ranks: tuple[int, ...], missing_ranks: tuple[int, ...], failures: tuple[Failure, ...], *, steps_from: str
) -> JobInfo:
    """What a job's metadata tell about it; its step time, which they do not, is 0."""
    runs = dict(sorted(job.runs.items()))
    first = next(iter(runs.values()), None)
    strategies = tuple(sorted({strategy for run in runs.values() for strategy in run.strategies})) or ("unknown",)
    known = len(ranks) + len(missing_ranks)
    return JobInfo(
        world_size=max((run.world_size for run in runs.values()), default=known or None),
        ranks=ranks,
        missing_ranks=missing_ranks,
        failures=failures,
        steps=(),
        step_time_us=0.0,
        step_time_us_per_step=(),
        strategy=strategies[0] if len(strategies) == 1 else strategies,
        backend=first.backend or None if first else None,
        devices=tuple(
            dict.fromkeys(
                name for run in runs.values() if (name := "CPU" if run.device.type == "cpu" else run.device.name)
            )
        ),
        perturbation=None,
        steps_from=steps_from,
        command=job.launch.command if job.launch else (first.command if first else ()),
        started_at=(job.launch.started_at if job.launch else "") or (first.started_at if first else "") or None,
        batch_shape=first.batch_shape if first else None,
        settings=dict(first.settings) if first else {},
        versions=dict(first.versions) if first else {},
        exit_code=job.launch.exit_code if job.launch else None,
    )


def _headline(history: History, slowest: RankHistory) -> str:
    step = f"Steps take {duration(slowest.median_us)} (median of {slowest.steps:,})"
    if _evaluates(history):
        return f"{step}; evaluations take {evaluation_share(history):.0%} of the steps' time."
    if history.stragglers:
        return f"{step}; {history.stragglers[0].in_words()}."
    if history.change is not None and history.change.slower:
        return f"{step}; {history.change.in_words()}."
    first = history.slow_ranks[0] if history.slow_ranks else None
    if first is not None and first.excess_us >= NOTICEABLE * slowest.median_us:
        longer = f"{duration(first.excess_us)} more {STAGE_WORDS[first.stage]}"
        return f"{step}; rank {first.rank} spends {longer} than its peers."
    loader, share = max(
        ((row, row.stages_us.get("dataloader", 0.0) / row.mean_us) for row in history.ranks if row.mean_us > 0),
        key=lambda entry: entry[1],
        default=(slowest, 0.0),
    )
    if share >= NOTICEABLE:
        where = f" on rank {loader.rank}" if len(history.ranks) > 1 else ""
        return f"{step}; data loading takes {share:.0%} of each step{where}."
    if history.long_steps is not None and history.long_steps.share >= NOTICEABLE:
        return f"{step}; {history.long_steps.in_words()}."
    if slowest.outlier_steps:
        around = "those around it" if slowest.outlier_steps == 1 else "those around them"
        return f"{step}; {slowest.outlier_steps:,} of them took at least 1.5 times as long as {around}."
    loading = f"data loading takes {share:.0%}, and " if share >= _SHOWN else ""
    return f"{step}; {loading}no step is an outlier."


def evaluation_share(history: History) -> float:
    """Part of the steps' time in evaluations, of the rank that spends the most in them."""
    return max((row.stages_us.get("evaluation", 0.0) / row.mean_us for row in history.ranks if row.mean_us), default=0)


def _evaluates(history: History) -> bool:
    """Are evaluations what takes the most, beside ranks that delay the others?"""
    delayed = max((row.cost_share for row in history.stragglers), default=0.0)
    return evaluation_share(history) >= max(EVALUATES, delayed)


def _slow_from(history: History) -> int:
    """The step from which on the run is slow, or what delays it does; 0: from its start, or not from one step on."""
    first = min(row.first_step for row in history.ranks)
    rows = [row for row in history.stragglers[:1] if row.pattern == "steady"]
    since = rows[0].first_step if rows else 0
    if history.change is not None and history.change.slower:
        since = max(since, history.change.first_step)
    return since if since >= first + FEWEST_STEPS else 0


def _first_action(job: Job, history: History, slowest: RankHistory) -> str | None:
    """How to get a trace; to evaluate less where that is most of it."""
    if _evaluates(history):
        return EVALUATE_LESS
    modes = {run.mode for run in job.runs.values()}
    if modes & {"nvtx", "nsys"}:
        return "Open the report of the profiler that recorded this run; PerfScope's ranges in it are named perfscope::."
    if job.launch is not None and not job.launch.has_ended and modes:
        return f"Record a few steps to see why: perfscope trigger {job.path}."
    if modes & {"trigger"} and slowest.outlier_steps:
        return (
            "Steps were slow, but no capture was finished: let the job run longer, as a capture begins 3 seconds after "
            "the slow step that starts it, or leave --trigger out and record such a step with a larger --active."
        )
    if modes & {"trigger"}:
        return "No step was slow enough to start a capture: give --trigger a smaller factor, or leave it out."
    if modes & {"steps"}:
        late = _slow_from(history)
        then = f" and add --wait {late}, from where on they are slow" if late else ""
        return f"Record a few steps to see why: leave out --steps-only{then}, or record slow steps with --trigger 1.5."
    return "Record a few steps to see why: with --wait 1 --warmup 1 and an --active that the job reaches."


def _notes(job: Job, history: History) -> Iterator[Note]:
    yield note("history", "history_only", reason=_NO_TRACE)
    restarted = [row.rank for row in history.ranks if row.attempt]
    if restarted:
        yield note("history", "restarted", restarted, steps=max(row.earlier_steps for row in history.ranks))
    incomplete = [row.rank for row in history.ranks if row.lost_steps]
    if incomplete:
        yield note("history", "history_incomplete", incomplete, steps=max(row.lost_steps for row in history.ranks))
    if history.missing_ranks:
        yield note("ranks", "ranks_without_history", history.missing_ranks, count=len(history.missing_ranks))
    if not history.compared and "pipeline" in {name for run in job.runs.values() for name in run.strategies}:
        yield note("history", "pipeline_not_compared")
    yield from collector_problems({rank: run.problems for rank, run in sorted(job.runs.items())})
    if job.launch is not None and job.launch.exit_code:
        yield ended(job.launch.exit_code)
