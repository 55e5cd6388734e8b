"""Compare the ranks, ask the rules, and put everything found into a Summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from perfscope._version import __version__
from perfscope.analyzers import rules
from perfscope.analyzers.collectives.cost_model import cost_rows
from perfscope.analyzers.collectives.group_rows import group_rows
from perfscope.analyzers.collectives.table import collective_rows
from perfscope.analyzers.compared import Compared, compare_job, world_size
from perfscope.analyzers.comparison import Comparison, account_per_step, account_rows
from perfscope.analyzers.critical_path import critical_path
from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.flops.utilisation import device_names, utilisation
from perfscope.analyzers.identify import Identified
from perfscope.analyzers.lanes import lanes
from perfscope.analyzers.loading import dataloader_rows
from perfscope.analyzers.memory import memory_rows, memory_strips
from perfscope.analyzers.notes import job_notes
from perfscope.analyzers.pipelines.balance import balanced_step_ns
from perfscope.analyzers.pipelines.table import find_pipeline, pipeline_notes
from perfscope.analyzers.rank_steps import rank_steps
from perfscope.analyzers.straggling.culprits import straggler_rows
from perfscope.analyzers.strips import strips
from perfscope.analyzers.system.notes import system_notes
from perfscope.analyzers.system.table import system
from perfscope.analyzers.verdict import verdict
from perfscope.analyzers.whatif.curves import curves
from perfscope.analyzers.whatif.predict import predictor
from perfscope.analyzers.work.ncu import Measured
from perfscope.analyzers.work.sync_table import sync_rows
from perfscope.analyzers.work.tables import work_tables
from perfscope.findings import Finding, Prediction
from perfscope.job import Job
from perfscope.metadata import RunMetadata
from perfscope.summary import (
    ActionRow,
    ClockRow,
    EvidenceRow,
    FindingRow,
    PathRow,
    Plan,
    Replay,
    StragglerRow,
    Summary,
)
from perfscope.summary import Job as JobSummary
from perfscope.summary_tables import Pipeline


def summarize(
    job: Job, found: Identified, measured: Sequence[Measured] = (), compared: Compared | None = None
) -> Summary:
    """Compare the ranks found, unless they were ``compared`` already, and put everything into a Summary.

    ``measured`` are Nsight Compute's kernels.
    """
    compared = compared or compare_job(job, found)
    runs, result = compared.runs, compared.result
    utilised = utilisation(result, runs)
    machines = system(job, result, runs)
    pipeline = find_pipeline(result, runs)
    devices, groups = device_names(result, runs), group_rows(result)
    tables = work_tables(result, devices, _command(job, runs), measured)
    memory = memory_rows(result, runs)
    facts = JobFacts(
        step_time_us=result.step_ns / 1e3,
        steps=len(result.steps) if _is_marked(result) else 0,
        ranks=tuple(sorted(result.partials)),
        missing_ranks=_missing(result, runs),
        accounting=account_rows(result),
        dataloader=dataloader_rows(result, runs),
        collectives=collective_rows(result.matched, result.steps),
        cost_model=cost_rows(compared.models, result.matched.instances),
        stragglers=_stragglers(compared),
        strategies=_strategies(result, runs, pipeline),
        perturbation=_perturbation(result, runs),
        runs=runs,
        system=machines,
        microbatches=_microbatches(result),
        pipeline=pipeline,
        balanced_step_ns=balanced_step_ns(compared, pipeline),
        devices=devices,
        kernels=tables.kernels,
        operators=tables.operators,
        modules=tables.modules,
        launches=tables.launches,
        syncs=sync_rows(result),
        groups=groups,
        memory=memory,
        step_numbers=tuple(int(step) for step in result.steps),
        per_step=rank_steps(result),
        predict=predictor(compared),
    )
    findings = rules.evaluate(facts)
    described = _job(job, found, result, runs, facts)
    summary = Summary(
        job=described,
        accounting=facts.accounting,
        clock=_clock(result),
        collectives=facts.collectives,
        cost_model=facts.cost_model,
        stragglers=facts.stragglers,
        critical_path=_path(result),
        dataloader=facts.dataloader,
        utilisation=utilised,
        memory=memory,
        replay=_replay(compared),
        plan=_plan(findings, facts),
        curves=curves(facts, [finding.whatif for finding in findings]),
        findings=tuple(_finding_row(finding) for finding in findings),
        verdict=verdict(facts, findings),
        notes=(
            *found.notes,
            *job_notes(job, result, facts),
            *pipeline_notes(facts),
            *system_notes(job, machines),
            *tables.notes,
        ),
        strips=strips(result, _telling(facts)),
        lanes=lanes(result, _telling(facts)),
        kernels=tables.kernels,
        operators=tables.operators,
        modules=tables.modules,
        launches=tables.launches,
        ncu_command=tables.ncu_command,
        memory_timeline=memory_strips(result),
        groups=groups,
        pipeline=pipeline,
        system=machines,
        perfscope_version=__version__,
        source=str(job.path),
    )
    summary.self_check()
    return summary


def _is_marked(result: Comparison) -> bool:
    return all(partial.steps.marked for partial in result.partials.values())


def _missing(result: Comparison, runs: Mapping[int, RunMetadata]) -> tuple[int, ...]:
    size = world_size(result.partials, runs)
    return tuple(rank for rank in range(size or 0) if rank not in result.partials)


def _strategies(result: Comparison, runs: Mapping[int, RunMetadata], pipeline: Pipeline | None) -> tuple[str, ...]:
    told = {strategy for run in runs.values() for strategy in run.strategies}
    if not told:
        told = {strategy for partial in result.partials.values() for strategy in partial.strategies}
    if pipeline is not None:
        told |= {"pipeline"}
    if not told and world_size(result.partials, runs) == 1:
        told = {"single"}
    return tuple(sorted(told))


def _job(
    job: Job, found: Identified, result: Comparison, runs: Mapping[int, RunMetadata], facts: JobFacts
) -> JobSummary:
    start, end = result.windows[result.slowest]
    first = runs[min(runs)] if runs else None
    lowest = result.partials[min(result.partials)]
    unprofiled = _unprofiled_ns(runs)
    strategies = facts.strategies or ("unknown",)
    hosts = dict.fromkeys(result.hosts.names[rank] for rank in facts.ranks if rank in result.hosts.names)
    return JobSummary(
        world_size=world_size(result.partials, runs),
        ranks=facts.ranks,
        missing_ranks=facts.missing_ranks,
        failures=tuple(found.failures),
        steps=tuple(int(step) for step in result.steps) if _is_marked(result) else (),
        step_time_us=facts.step_time_us,
        step_time_us_per_step=tuple(float(window) / 1e3 for window in end - start),
        strategy=strategies[0] if len(strategies) == 1 else strategies,
        backend=(first.backend if first else "") or lowest.backend or None,
        devices=facts.devices,
        perturbation=facts.perturbation,
        steps_from=lowest.steps.source,
        hosts=tuple(hosts),
        command=_command(job, runs),
        started_at=(job.launch.started_at if job.launch else "") or (first.started_at if first else "") or None,
        model=_model(first),
        batch_shape=first.batch_shape if first else None,
        settings=dict(first.settings) if first else {},
        versions=dict(first.versions) if first and first.versions else dict(lowest.versions),
        unprofiled_step_us=unprofiled / 1e3 if unprofiled else None,
        exit_code=job.launch.exit_code if job.launch else None,
        batches_per_step=_batches(result),
        account_us_per_step=account_per_step(result) if _is_marked(result) else {},
    )


def _command(job: Job, runs: Mapping[int, RunMetadata]) -> tuple[str, ...]:
    """What was run; empty where nothing recorded it."""
    return job.launch.command if job.launch else (runs[min(runs)].command if runs else ())


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


def _unprofiled_ns(runs: Mapping[int, RunMetadata]) -> float | None:
    """Median wall time of a step outside the recording, of the slowest rank."""
    medians = [median(run.steps.unprofiled_ns) for run in runs.values() if run.steps.unprofiled_ns]
    return max(medians, default=None)


def _perturbation(result: Comparison, runs: Mapping[int, RunMetadata]) -> float | None:
    unprofiled = _unprofiled_ns(runs)
    return _profiled_ns(result) / unprofiled if unprofiled and _is_marked(result) else None


def _profiled_ns(result: Comparison) -> float:
    """Median host window of a profiled step, of the slowest rank."""
    return max(
        float(np.median(partial.steps.host_end_ns - partial.steps.host_start_ns))
        for partial in result.partials.values()
    )


def _clock(result: Comparison) -> tuple[ClockRow, ...]:
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


def _stragglers(compared: Compared) -> tuple[StragglerRow, ...]:
    if not _is_marked(compared.result):
        return ()
    complete = not _missing(compared.result, compared.runs)
    return straggler_rows(
        compared.result, compared.recorded, compared.played, compared.result.hosts.names, complete=complete
    )


def _replay(compared: Compared) -> Replay:
    """The unchanged steps, played again; only measured where they do not play to their end."""
    measured = compared.result.step_ns
    if not compared.played.complete:
        return Replay(measured_step_us=measured / 1e3)
    replayed = float(compared.recorded.slowest_ns(compared.played).mean())
    return Replay(measured_step_us=measured / 1e3, replayed_step_us=replayed / 1e3, error=abs(replayed / measured - 1))


def _path(result: Comparison) -> tuple[PathRow, ...] | None:
    """Mean over the used steps of the slowest rank; None where its windows leave gaps or its clock is its own."""
    rank = result.slowest
    start, end = result.windows[rank]
    if not np.array_equal(start[1:], end[:-1]):
        return None
    offset = result.clocks.offset_of(rank)
    segments = critical_path(
        result.partials,
        result.timelines,
        result.matched,
        result.clocks,
        int(start[0]) + offset,
        int(end[-1]) + offset,
        rank,
    )
    rows = [
        PathRow(rank=owner, category=row.label, us=length / len(start) / 1e3)
        for (owner, row), length in segments.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.us))


def _microbatches(result: Comparison) -> int:
    own = (partial.forwards[partial.steps.indices_of(result.steps)] for partial in result.partials.values())
    return max((int(np.median(forwards)) for forwards in own), default=1)


def _telling(facts: JobFacts) -> tuple[int, ...]:
    """Ranks that a picture of few must show: those blamed, and one of each pipeline stage."""
    stages = facts.pipeline.stages if facts.pipeline is not None else ()
    return (*(row.rank for row in facts.stragglers[:2]), *(row.ranks[0] for row in stages if row.ranks))


def _batches(result: Comparison) -> float | None:
    """Batches that a rank takes in a used step, mean over ranks and steps; None without a data loader."""
    own = [partial.loading.batches[partial.steps.indices_of(result.steps)] for partial in result.partials.values()]
    return float(np.mean(own)) or None


def _plan(findings: tuple[Finding, ...], facts: JobFacts) -> Plan | None:
    joint = rules.joint_plan(findings, facts)
    if joint is None:
        return None
    settings, predicted = joint
    return Plan(whatif=settings, predicted_step_us=_in_us(predicted))


def _in_us(predicted: Prediction) -> dict[str, float]:
    return {"low": predicted.low / 1e3, "mid": predicted.mid / 1e3, "high": predicted.high / 1e3}


def _finding_row(finding: Finding) -> FindingRow:
    predicted = finding.predicted_step_ns
    return FindingRow(
        rule=finding.rule,
        title=finding.title,
        severity=finding.severity.value,
        evidence=tuple(
            EvidenceRow(what=entry.what, value=entry.value, unit=entry.unit, ranks=entry.ranks)
            for entry in finding.evidence
        ),
        action=ActionRow(
            setting=finding.action.setting,
            old=finding.action.old,
            new=finding.action.new,
            how=finding.action.how,
            costs=finding.action.costs,
        ),
        predicted_step_us=None if predicted is None else _in_us(predicted),
        whatif=dict(finding.whatif),
        ceiling=finding.ceiling,
        obtained=finding.obtained.value,
        confidence=finding.confidence.value,
    )
