"""What the reader must know to judge the numbers: what is missing, bounded, assumed or perturbed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.unprofiled import LONG, longer_ns
from perfscope.analyzers.job.utilisation import blind_ranks
from perfscope.analyzers.rank.collectives.collectives import UNKNOWN_GROUP
from perfscope.analyzers.rank.host_activity import EVALUATING
from perfscope.analyzers.rank.pauses import FUNCTION
from perfscope.analyzers.rank.steps import BY_OPTIMIZER, BY_REPETITION, lost_work
from perfscope.recording.job import Job
from perfscope.results.categories import TimeCategory
from perfscope.results.notes import Note, collector_problems, ended, note
from perfscope.results.rows import FEW_STEPS, JobInfo
from perfscope.results.time_breakdown import TimeBreakdown
from perfscope.trace.trace import Bool

BY_BACKWARD: Final = ("backward", "gradients")
"""What steps were found by (``StepsMetadata.detected_by``) where each is a backward pass."""

_NAMED: Final = 5
"""Processes that a note names at most."""

HIDDEN_SHARE: Final = 0.05
"""Share of the recorded time that a host waited for its first batch from which that is said, where it counts as
hidden.
"""

BY_WORK: Final = 0.5
"""Part of what a step takes longer that its FLOPs explain, from which it has more to compute."""
FEW_ARE_LONG: Final = 0.25
"""Share of the steps that are long at most, for them to be an exception."""
LONG_SHARE: Final = 0.05
"""Of the recorded time, from which what they take longer is told."""

UNKNOWN_SHARE: Final = 0.02
"""Idle time without a cause above this share of the step is a defect of the recording or of the analysis."""


def job_notes(job: Job, result: AlignedJob, info: JobInfo, time_breakdown: Iterable[TimeBreakdown]) -> tuple[Note, ...]:
    """Every note on this job, the gravest kinds first."""
    return (
        *_about_steps(job, result, info),
        *_about_ranks(job, info),
        *_about_reading(result),
        *_about_devices(job, result),
        *_about_collectives(result, info),
        *_about_clock(result),
        *_about_graphs(result),
        *_about_idle(time_breakdown),
        *_about_stacks(time_breakdown),
        *_about_captures(job),
        *_about_collection(job),
    )


def _about_steps(job: Job, result: AlignedJob, info: JobInfo) -> Iterator[Note]:
    if not info.steps:
        yield note("steps", "no_steps", steps_from=info.steps_from)
    elif info.few_steps:
        yield note("steps", "few_steps", count=len(info.steps))
    if info.steps:
        yield from _about_first_wait(result)
    yield from _about_long_steps(result)
    if len(result.starting):
        yield note(
            "steps",
            "starting_left_out",
            steps=result.starting.tolist(),
            times=_times(result),
        )
    if len(result.evaluated):
        used = np.isin(result.evaluated, result.steps).any()
        evaluated, share = result.evaluated.tolist(), result.evaluated_share
        by = [rank for rank, partial in result.partials.items() if partial.named_host.get(EVALUATING)]
        alone = by if len(by) < len(result.partials) else []
        kind = "evaluation_used" if used else "evaluation_left_out"
        yield note("steps", kind, steps=evaluated, share=share, alone=alone)
    sources = {partial.steps.source for partial in result.partials.values()}
    if info.steps and BY_OPTIMIZER in sources:
        yield note("steps", "steps_by_optimizer")
    if info.steps and BY_REPETITION in sources:
        yield note("steps", "steps_by_repetition")
    if info.steps and any(run.steps.detected_by in BY_BACKWARD for run in job.runs.values()):
        yield note("steps", "steps_by_backward")


def _about_first_wait(result: AlignedJob) -> Iterator[Note]:
    """Where a host waited for a batch as the recording began, and its device is only assumed to have worked meanwhile.

    Of several steps, only where no other one waits as long: else the others count such waits.
    """
    waited = {}
    for rank, partial in result.partials.items():
        first, *others = partial.steps.indices_of(result.steps)
        waited_ns = partial.loading.waited_ns
        hidden_ns = min(int(partial.steps.assumed_ns[first]), int(waited_ns[first]))
        if hidden_ns < HIDDEN_SHARE * result.step_ns * len(result.steps):
            continue
        if not others or hidden_ns > LONG * waited_ns[others].max():
            waited[rank] = hidden_ns / result.step_ns
    if waited:
        kind = "lone_step_waits" if len(result.steps) == 1 else "first_step_waits"
        yield note("steps", kind, sorted(waited), share=max(waited.values()))


def _times(result: AlignedJob) -> float:
    """How many times as long as the used steps the starting ones take, mean over the ranks."""
    times = []
    for partial in result.partials.values():
        took = partial.steps.end_ns - partial.steps.start_ns
        started, used = (took[partial.steps.indices_of(steps)].mean() for steps in (result.starting, result.steps))
        times.append(started / max(used, 1.0))
    return float(np.mean(times))


def _about_stacks(time_breakdown: Iterable[TimeBreakdown]) -> Iterator[Note]:
    """Where Python functions were recorded, each call takes longer, and other work does not."""
    ranks = [row.rank for row in time_breakdown if any(map(FUNCTION.search, row.named_host_us))]
    if ranks:
        yield note("steps", "stacks", ranks)


def _about_long_steps(result: AlignedJob) -> Iterator[Note]:
    """Where few of the used steps take far longer than the others."""
    start, end = result.job_windows
    took = (end - start).astype(np.float64)
    usual = float(np.median(took)) if len(took) else 0.0
    long = took > LONG * usual
    if len(took) < FEW_STEPS or not long.any() or long.mean() > FEW_ARE_LONG or not result.is_marked:
        return
    share = float((took[long] - usual).sum() / took.sum())
    if share < LONG_SHARE:
        return
    over = np.mean([longer_ns(totals, long) for totals in result.totals.values()], axis=0)
    category = TimeCategory(int(over.argmax()))
    one = long.sum() == 1
    steps, times, work = result.steps[long].tolist(), float(took[long].mean() / usual), _times_the_flops(result, long)
    if work - 1 >= BY_WORK * (times - 1):
        kind = "long_step_of_more_work" if one else "long_steps_of_more_work"
        yield note("steps", kind, steps=steps, times=times, work=work)
    elif category is TimeCategory.DATALOADER:
        kind = "long_step_of_loading" if one else "long_steps_of_loading"
        yield note("steps", kind, steps=steps, times=times, share=share)
    elif category is TimeCategory.COMM_TRANSFER:
        kind = "long_step_of_communication" if one else "long_steps_of_communication"
        yield note("steps", kind, steps=steps, times=times, share=share, category=category.phrase)
    else:
        kind = "long_step" if one else "long_steps"
        yield note("steps", kind, steps=steps, times=times, share=share, category=category.phrase)


def _times_the_flops(result: AlignedJob, long: Bool) -> float:
    """How many times as many FLOPs as the others these of the used steps have, over all ranks; 0 where not known."""
    known = [(partial.flops.model.sum(axis=0), partial.steps) for partial in result.partials.values()]
    flops = np.sum([model[steps.indices_of(result.steps)] for model, steps in known], axis=0)
    return float(flops[long].mean() / flops[~long].mean()) if flops.all() else 0.0


def _about_ranks(job: Job, info: JobInfo) -> Iterator[Note]:
    if job.further:
        yield note("ranks", "further_jobs", folders=job.further)
    if info.missing_ranks:
        missing = len(info.missing_ranks)
        yield note("ranks", "missing_ranks", info.missing_ranks, missing=missing, all=missing + len(info.ranks))


def _about_reading(result: AlignedJob) -> Iterator[Note]:
    """What was not read, or is not used; once where it is the same of several ranks."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, partial in sorted(result.partials.items()):
        report = partial.parse_report
        problems = []
        if report.truncated:
            problems.append("the file ends early: steps up to the cut were read")
        if report.dropped_events:
            problems.append(f"{report.dropped_events} events could not be read")
        if report.repaired_events:
            problems.append(f"{report.repaired_events} events of invalid JSON were repaired")
        problems += report.notes
        if problems:
            alike.setdefault(tuple(problems), []).append(rank)
    for same, ranks in alike.items():
        source = result.partials[ranks[0]].source
        if len(ranks) == 1:
            yield note("reading", "reading", ranks, rank=ranks[0], source=source, problems=list(same))
        else:
            yield note("reading", "reading_alike", ranks, source=source, more=len(ranks) - 1, problems=list(same))


def _about_devices(job: Job, result: AlignedJob) -> Iterator[Note]:
    blind = blind_ranks(result, job.runs)
    cut = tuple(rank for rank in blind if result.partials[rank].parse_report.truncated)
    if cut:
        yield note("time_breakdown", "device_events_cut", cut)
    lost = tuple(
        rank
        for rank, partial in sorted(result.partials.items())
        if partial.has_device_work and lost_work(partial.parse_report, partial.steps)
    )
    if lost:
        yield note("time_breakdown", "device_events_lost", lost)
    unread = {rank: names for rank in blind if (names := result.partials[rank].parse_report.unread_processes)}
    if unread:
        shown = sorted({name for names in unread.values() for name in names})[:_NAMED]
        yield note("time_breakdown", "device_events_unread", unread, names=shown)
    if without := tuple(rank for rank in blind if rank not in cut and rank not in unread):
        yield note("time_breakdown", "no_device_events", without)


def _about_collectives(result: AlignedJob, info: JobInfo) -> Iterator[Note]:
    about = "collectives"
    for mismatch in result.mismatches[:3]:
        yield note(about, "mismatch", mismatch.ranks, group=mismatch.group, step=mismatch.step, mismatch=mismatch.text)
    if len(result.mismatches) > 3:
        yield note(about, "more_mismatches", count=len(result.mismatches) - 3)
    instances = result.matched.instances
    unpaired = result.unpaired_messages
    missing = "participants_missing" if info.may_lack_ranks else "participants_not_found"
    for kind, apart in ((missing, ~instances.complete & ~unpaired), ("messages_unpaired", unpaired)):
        if apart.any():
            yield note(about, kind, share=float(np.mean(apart)))
    if instances.inferred.any():
        yield note(about, "matched_by_end", count=int(instances.inferred.sum()))
    if UNKNOWN_GROUP in instances.groups:
        yield note(about, "group_unknown")


def _about_clock(result: AlignedJob) -> Iterator[Note]:
    clocks = result.clocks
    if result.hosts.source == "device numbers" and len(set(result.hosts.names.values())) > 1:
        yield note("clock", "hosts_by_device_number")
    alone = tuple(int(rank) for rank in clocks.ranks[~clocks.aligned])
    if alone:
        yield note("clock", "clock_alone", alone)


def _about_idle(time_breakdown: Iterable[TimeBreakdown]) -> Iterator[Note]:
    shares = {row.rank: row.idle_unknown_us / row.step_time_us for row in time_breakdown if row.step_time_us}
    unknown = {rank: share for rank, share in shares.items() if share > UNKNOWN_SHARE}
    if unknown:
        yield note("time_breakdown", "idle_unknown", unknown, share=max(unknown.values()))


def _about_graphs(result: AlignedJob) -> Iterator[Note]:
    launches = {}
    for rank, partial in sorted(result.partials.items()):
        per_step = partial.tables.launches.unlisted_graphs[partial.steps.indices_of(result.steps)]
        if per_step.any():
            launches[rank] = float(per_step.mean())
    if launches:
        yield note("time_breakdown", "graphs_unlisted", launches, launches=max(launches.values()))


def _about_captures(job: Job) -> Iterator[Note]:
    if len(job.captures) > 1:
        shown = f"The recording holds captures {', '.join(map(str, job.captures))}; capture {job.capture} is shown."
        yield note("steps", "other_captures", choice=job.choice or shown)
    captures = [run.capture(job.capture) for run in job.runs.values()] if job.capture is not None else []
    for reason in dict.fromkeys(capture.reason for capture in captures if capture is not None and capture.reason):
        yield note("collection", "unplanned_capture", reason=reason)


def _about_collection(job: Job) -> Iterator[Note]:
    yield from collector_problems({rank: run.problems for rank, run in sorted(job.runs.items())})
    unfinished = [run for _, run in sorted(job.runs.items()) if any(not last.complete for last in run.captures[-1:])]
    cut = [run.rank for run in unfinished if not run.went_on]
    if cut:
        yield note("collection", "job_cut", cut)
    if job.launch is not None and job.launch.exit_code:
        yield ended(job.launch.exit_code)
