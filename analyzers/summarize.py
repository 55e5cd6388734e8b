"""The job's Summary: ranks aligned and replayed, every table computed, the rules evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from statistics import median
from typing import Final

import numpy as np

from perfscope._version import __version__
from perfscope.analyzers import rules
from perfscope.analyzers.defects import Defects
from perfscope.analyzers.job.aligned import AlignedJob, breakdown_us_per_step, time_breakdowns
from perfscope.analyzers.job.asleep import slept_between_ns
from perfscope.analyzers.job.blocks import us
from perfscope.analyzers.job.collectives.cost_model import cost_rows
from perfscope.analyzers.job.collectives.of_backward import reduced_in_backward_per_step
from perfscope.analyzers.job.collectives.of_layers import rows_of_layers
from perfscope.analyzers.job.collectives.of_loop import averaged_per_step, calls_per_step, places_of_calls
from perfscope.analyzers.job.collectives.returned import returned_per_step
from perfscope.analyzers.job.collectives.table import collective_rows
from perfscope.analyzers.job.critical_path import critical_path
from perfscope.analyzers.job.extra_work import extra_cost, loop_costs, loop_work_costs
from perfscope.analyzers.job.identify import IdentifiedRanks
from perfscope.analyzers.job.lanes import lanes, step_timelines
from perfscope.analyzers.job.loading import dataloader_rows
from perfscope.analyzers.job.memory import memory_rows, memory_timelines
from perfscope.analyzers.job.notes import job_notes
from perfscope.analyzers.job.pipelines.table import find_pipeline, pipeline_notes
from perfscope.analyzers.job.rank_steps import rank_steps
from perfscope.analyzers.job.slow_operators import slow_operators
from perfscope.analyzers.job.slow_transfers import slow_transfer_steps
from perfscope.analyzers.job.strategies import job_strategies
from perfscope.analyzers.job.system.notes import system_notes
from perfscope.analyzers.job.tables.compiled import compiled_tables, kernels_with_sources, operators_with_sources
from perfscope.analyzers.job.tables.groups import group_rows
from perfscope.analyzers.job.tables.kernels import kernel_rows
from perfscope.analyzers.job.tables.ncu import MeasuredKernel, ncu_command, unlisted_notes, with_roofline
from perfscope.analyzers.job.tables.operators import operator_rows
from perfscope.analyzers.job.tables.syncs import sync_rows
from perfscope.analyzers.job.tables.tables import launch_rows, module_rows
from perfscope.analyzers.job.unprofiled import unprofiled_median_ns, unprofiled_step_ns
from perfscope.analyzers.job.utilisation import device_names, utilisation
from perfscope.analyzers.replay.engine import replay as replay_schedules
from perfscope.analyzers.replay.job_replay import JobReplay, replay_job, world_size
from perfscope.analyzers.replay.step_time import is_trusted
from perfscope.analyzers.replay.stragglers.contention import contention_notes, without_contention
from perfscope.analyzers.replay.stragglers.profiling_effects import profiling_effect_notes, without_profiling_effects
from perfscope.analyzers.replay.stragglers.rows import straggler_rows
from perfscope.analyzers.replay.stragglers.steady_pauses import with_steady_pauser, with_steady_pauses
from perfscope.analyzers.samples import positions_per_sample, samples_per_batch, samples_per_step
from perfscope.analyzers.verdict import of_snapshots, verdict
from perfscope.analyzers.whatif.curves import curves
from perfscope.analyzers.whatif.predict import predictor
from perfscope.analyzers.whatif.stage_balance import balanced_step_us
from perfscope.recording.job import Job
from perfscope.recording.metadata import RunMetadata
from perfscope.results.attribution import attributed_ranks
from perfscope.results.findings import Finding
from perfscope.results.memory.snapshots import MemorySnapshots
from perfscope.results.rows import ClockRow, JobInfo, PathRow, Replay, StragglerRow, Verdict
from perfscope.results.summary import Summary
from perfscope.results.tables import Pipeline
from perfscope.text import of_recording
from perfscope.trace.hardware import peaks_of

_NO_VERDICT: Final = Verdict(headline="", healthy=True, first_action=None)
"""In a summary that the rules have not seen yet."""

_EXACT: Final = 0.01
"""Error of the replay from which it is looked whether one with hosts beside their devices is better."""


def summarize(
    job: Job,
    identified: IdentifiedRanks,
    measured: Sequence[MeasuredKernel] = (),
    replay: JobReplay | None = None,
    snapshots: MemorySnapshots | None = None,
) -> Summary:
    """Align and replay the identified ranks, unless that was done already (``replay``), and put everything into a
    Summary.

    ``measured`` are Nsight Compute's kernels, ``snapshots`` what torch's memory snapshots show.
    """
    replay = replay or replay_job(job, identified)
    runs, result = replay.runs, replay.result
    pipeline, machines = find_pipeline(result, runs), replay.system
    late = with_steady_pauses(_stragglers(replay), result)
    own = without_contention(late, result, runs, machines, replay.core_ns)
    if pipeline is None:
        own = with_steady_pauser(own, result, replay.core_ns)
    groups, size = group_rows(result), world_size(result.partials, runs)
    strategies = job_strategies(result, runs, pipeline, groups, size) or ("unknown",)
    info = _job_info(job, identified, result, runs, strategies)
    stragglers = without_profiling_effects(own, result, runs, info.unprofiled_step_us)
    of_profiling = [row for row in own if row not in stragglers]
    peaks = peaks_of(info.devices[0]) if len(info.devices) == 1 else None
    kernels, unlisted = with_roofline(kernel_rows(result, peaks), measured)
    compiled = compiled_tables(job.compiled, result, job.provenance, job.annotations)
    kernels = kernels_with_sources(kernels, compiled)
    time_breakdown = time_breakdowns(result)
    shown = _shown_ranks(stragglers, pipeline)
    summary = Summary(
        job=info,
        time_breakdown=time_breakdown,
        clock=_clock(result),
        collectives=collective_rows(result.matched, result.steps),
        cost_model=cost_rows(replay.models, result.matched.instances),
        stragglers=stragglers,
        critical_path=_path(result),
        dataloader=dataloader_rows(result, runs),
        utilisation=utilisation(result, runs),
        memory=memory_rows(result, runs),
        replay=_replay(replay),
        findings=(),
        verdict=_NO_VERDICT,
        notes=(
            *identified.notes,
            *job_notes(job, result, info, time_breakdown),
            *pipeline_notes(pipeline, info.strategies),
            *system_notes(job, machines),
            *contention_notes([row for row in late if row not in own and not _are_told(row, own)], info.step_time_us),
            *profiling_effect_notes(of_profiling, result, runs, info.unprofiled_step_us),
            *unlisted_notes(unlisted),
            *compiled.notes,
        ),
        step_timeline=step_timelines(result, shown),
        lanes=lanes(result, shown),
        kernels=kernels,
        operators=operators_with_sources(operator_rows(result, peaks), compiled),
        modules=module_rows(result),
        compiled=compiled.calls,
        compiled_modules=compiled.modules,
        launches=launch_rows(result),
        ncu_command=ncu_command(kernels, info.devices, info.command),
        memory_timeline=memory_timelines(result),
        groups=groups,
        snapshots=snapshots,
        pipeline=pipeline,
        system=machines,
        perfscope_version=__version__,
        source=job.shown_path,
        capture=job.capture if len(job.captures) > 1 else None,
    )
    summary.self_check()
    predict = predictor(replay)
    return _advised(
        rules.RuleContext(
            summary=summary,
            runs=runs,
            per_step=rank_steps(result),
            core_us={rank: us(ns) for rank, ns in replay.core_ns.items()},
            slept_us={rank: ns / 1e3 for rank, ns in slept_between_ns(result, runs).items()},
            slow_operators=slow_operators(result, stragglers),
            syncs=sync_rows(result),
            collectives_on_host=any(partial.collectives.on_host for partial in result.partials.values()),
            microbatches=_microbatches(result),
            recomputation=extra_cost(result, attrgetter("recomputation")),
            conversions=extra_cost(result, attrgetter("conversions")),
            loops=loop_costs(result),
            loop_work=loop_work_costs(result),
            loop_collectives=calls_per_step(result.partials, result.matched, len(result.steps)),
            loop_places=places_of_calls(result.partials, result.matched),
            slow_transfers=slow_transfer_steps(result),
            averaged=averaged_per_step(result.partials, result.matched, len(result.steps)),
            reduced_in_backward=reduced_in_backward_per_step(result.partials, result.matched, len(result.steps)),
            returned=returned_per_step(result.partials, result.matched, len(result.steps)),
            of_layers=rows_of_layers(result.partials, result.matched),
            balanced_step_us=balanced_step_us(replay, pipeline),
            predict=predict,
            may_save=None if predict is None else predict.may_save,
            predict_unprofiled=predictor(replay, unprofiled=True),
            outpaced=replay.ready_ns is not None,
        )
    )


def with_snapshots(summary: Summary, runs: Mapping[int, RunMetadata], snapshots: MemorySnapshots | None) -> Summary:
    """A summary without traces, with what memory snapshots show, and what the rules find in that."""
    if snapshots is None:
        return summary
    summary = replace(summary, snapshots=snapshots)
    summary = replace(summary, findings=rules.of_snapshots(rules.RuleContext(summary=summary, runs=runs)))
    return summary if summary.hang or summary.history else replace(summary, verdict=of_snapshots(summary))


def _advised(context: rules.RuleContext) -> Summary:
    """The summary with what the rules find in it, and what follows from that."""
    defects = Defects()
    findings = rules.unprofiled(rules.evaluate(context, defects), context)
    if not context.info.steps:
        findings = tuple(map(_of_recording, findings))
    predict = context.predict_unprofiled or context.predict
    summary = replace(
        context.summary,
        stragglers=rules.as_sure_as_findings(context.summary.stragglers, findings, context),
        findings=findings,
        plan=defects.attempt("The joint plan", partial(rules.joint_plan, findings, predict), None),
        curves=defects.attempt(
            "What-if curves",
            partial(curves, context.summary, context.runs, predict, [finding.whatif for finding in findings]),
            (),
        ),
    )
    summary = replace(summary, notes=(*summary.notes, *defects.notes()))
    found = verdict(summary)
    if not context.info.steps:
        action = found.first_action and of_recording(found.first_action)
        found = replace(found, headline=of_recording(found.headline), first_action=action)
    return replace(summary, verdict=found)


def _of_recording(finding: Finding) -> Finding:
    """The finding, in words that name no step."""
    evidence = tuple(replace(row, what=of_recording(row.what)) for row in finding.evidence)
    return replace(finding, title=of_recording(finding.title), evidence=evidence)


def _missing(result: AlignedJob, runs: Mapping[int, RunMetadata]) -> tuple[int, ...]:
    size = world_size(result.partials, runs)
    return tuple(rank for rank in range(size or 0) if rank not in result.partials)


def _job_info(
    job: Job,
    identified: IdentifiedRanks,
    result: AlignedJob,
    runs: Mapping[int, RunMetadata],
    strategies: tuple[str, ...],
) -> JobInfo:
    start, end = result.job_windows
    first = runs[min(runs)] if runs else None
    lowest = result.partials[min(result.partials)]
    unprofiled = unprofiled_step_ns(runs, result)
    unprofiled_median = unprofiled_median_ns(runs, result)
    ranks = tuple(sorted(result.partials))
    hosts = dict.fromkeys(result.hosts.names[rank] for rank in ranks if rank in result.hosts.names)
    ranks_of_job = world_size(result.partials, runs)
    batches = result.batches_per_step
    samples = [
        length * batches[rank]
        for rank in ranks
        if rank in runs and result.takes_batches(rank) and (length := samples_per_batch(runs[rank])) is not None
    ]
    return JobInfo(
        world_size=ranks_of_job,
        ranks=ranks,
        missing_ranks=_missing(result, runs),
        failures=tuple(identified.failures),
        steps=tuple(int(step) for step in result.steps) if result.is_marked else (),
        step_time_us=result.step_ns / 1e3,
        step_time_us_per_step=tuple(float(window) / 1e3 for window in end - start),
        strategy=strategies[0] if len(strategies) == 1 else strategies,
        backend=(first.backend if first else "") or lowest.backend or None,
        devices=device_names(result, runs),
        perturbation=_profiled_ns(result) / unprofiled_median if unprofiled_median and result.is_marked else None,
        steps_from=lowest.steps.source,
        hosts=tuple(hosts),
        command=job.launch.command if job.launch else (first.command if first else ()),
        started_at=(job.launch.started_at if job.launch else "") or (first.started_at if first else "") or None,
        model=_model(first),
        batch_shape=first.batch_shape if first else None,
        positions_per_sample=positions_per_sample(runs.values()),
        settings=dict(first.settings) if first else {},
        versions=dict(first.versions) if first and first.versions else dict(lowest.versions),
        unprofiled_step_us=unprofiled / 1e3 if unprofiled else None,
        exit_code=job.launch.exit_code if job.launch else None,
        batches_per_step=float(np.mean(list(batches.values()))) or None,
        samples_per_step=samples_per_step(samples, ranks_of_job, strategies),
        time_breakdown_us_per_step=breakdown_us_per_step(result) if result.is_marked else {},
    )


def _model(run: RunMetadata | None) -> dict[str, object] | None:
    if run is None or run.model is None:
        return None
    model = run.model
    return {
        "name": model.name,
        "parameters": model.parameters,
        "parameter_bytes": model.parameter_bytes,
        "trainable_bytes": model.trainable_bytes,
        "dtypes": list(model.dtypes),
        "compiled": model.compiled,
    }


def _profiled_ns(result: AlignedJob) -> float:
    """Median host window of a profiled step, of the slowest rank."""
    return max(
        float(np.median(partial.steps.host_end_ns - partial.steps.host_start_ns))
        for partial in result.partials.values()
    )


def _clock(result: AlignedJob) -> tuple[ClockRow, ...]:
    clocks = result.clocks
    return tuple(
        ClockRow(
            rank=int(rank),
            offset_us=float(clocks.offset_ns[index]) / 1e3,
            residual_us=float(clocks.residual_ns[index]) / 1e3 if clocks.aligned[index] else None,
            aligned=bool(clocks.aligned[index]),
            drift_ppm=float(clocks.drift_ppm[index]),
        )
        for index, rank in enumerate(clocks.ranks)
    )


def _are_told(row: StragglerRow, rows: Iterable[StragglerRow]) -> bool:
    """Is one of its ranks named by another row?"""
    return any(set(row.members) & set(other.members) for other in rows)


def _stragglers(replay: JobReplay) -> tuple[StragglerRow, ...]:
    if not replay.result.is_marked:
        return ()
    complete = not _missing(replay.result, replay.runs)
    result, hosts = replay.result, replay.result.hosts.names
    return straggler_rows(result, replay.recorded, replay.replayed, hosts, replay.core_ns, complete=complete)


def _replay(replay: JobReplay) -> Replay:
    """The recorded steps replayed unchanged; only measured where the replay does not reach their end."""
    measured = replay.result.step_ns
    if not replay.replayed.complete:
        return Replay(measured_step_us=measured / 1e3)
    replayed = replay.recorded.step_time_ns(replay.replayed)
    if abs(replayed / measured - 1) > _EXACT and replay.recorded.with_hosts is not None:
        # Stragglers and predictions then follow from hosts beside their devices.
        beside = replay_schedules(replay.recorded.with_hosts)
        if is_trusted(replay.recorded, beside, measured):
            replayed = replay.recorded.step_time_ns(beside)
    return Replay(measured_step_us=measured / 1e3, replayed_step_us=replayed / 1e3, error=abs(replayed / measured - 1))


def _path(result: AlignedJob) -> tuple[PathRow, ...] | None:
    """Mean over the used steps; None where these leave gaps."""
    start, end = result.job_windows
    if not np.array_equal(start[1:], end[:-1]):
        return None
    segments = critical_path(result, int(start[0]), int(end[-1]), result.last)
    rows = [
        PathRow(rank=owner, category=row.id, us=length / len(start) / 1e3) for (owner, row), length in segments.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.us))


def _microbatches(result: AlignedJob) -> int:
    steps = result.steps.tolist()
    own = ([partial.microbatches(step) for step in steps] for partial in result.partials.values())
    return max((int(median(counts)) for counts in own if counts), default=1)


def _shown_ranks(stragglers: Sequence[StragglerRow], pipeline: Pipeline | None) -> tuple[int, ...]:
    """Ranks that a picture of few must show: the stragglers, and one of each pipeline stage."""
    stages = pipeline.stages if pipeline is not None else ()
    return (*attributed_ranks(stragglers)[:2], *(row.ranks[0] for row in stages if row.ranks))
