"""Compare the ranks, ask the rules, and put everything found into a Summary."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import numpy as np

from perfscope._version import __version__
from perfscope.analyzers import rules
from perfscope.analyzers.collectives import collective_rows, cost_models, cost_rows
from perfscope.analyzers.comparison import Comparison, account_rows, compare
from perfscope.analyzers.critical_path import critical_path
from perfscope.analyzers.culprits import straggler_rows
from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.identify import Identified
from perfscope.analyzers.loading import dataloader_rows
from perfscope.analyzers.notes import job_notes
from perfscope.analyzers.replay.engine import Played, play
from perfscope.analyzers.replay.programs import Recorded, record
from perfscope.analyzers.strips import strips
from perfscope.analyzers.utilisation import device_names, utilisation
from perfscope.analyzers.verdict import verdict
from perfscope.findings import Finding
from perfscope.job import Job
from perfscope.metadata import RunMetadata
from perfscope.summary import (
    ActionRow,
    ClockRow,
    EvidenceRow,
    FindingRow,
    MemoryRow,
    PathRow,
    Replay,
    StragglerRow,
    Summary,
)
from perfscope.summary import Job as JobSummary


def summarize(job: Job, found: Identified) -> Summary:
    """Compare the ranks found and put everything into a Summary."""
    runs = {rank: run for rank, run in job.runs.items() if rank in found.partials}
    result = compare(found.partials, _first_step(job, runs))
    recorded = record(result)
    played = play(recorded.programs)
    models = cost_models(result.matched)
    utilised = utilisation(result, runs)
    facts = JobFacts(
        step_time_us=result.step_ns / 1e3,
        steps=len(result.steps) if _is_marked(result) else 0,
        ranks=tuple(sorted(result.partials)),
        missing_ranks=_missing(result, runs),
        accounting=account_rows(result),
        dataloader=dataloader_rows(result, runs),
        collectives=collective_rows(result.matched),
        cost_model=cost_rows(models, result.matched.instances),
        stragglers=_stragglers(result, recorded, played, runs),
        strategies=_strategies(result, runs),
        perturbation=_perturbation(result, runs),
        runs=runs,
    )
    findings = rules.evaluate(facts)
    summary = Summary(
        job=_job(job, found, result, runs, facts),
        accounting=facts.accounting,
        clock=_clock(result),
        collectives=facts.collectives,
        cost_model=facts.cost_model,
        stragglers=facts.stragglers,
        critical_path=_path(result),
        dataloader=facts.dataloader,
        utilisation=utilised,
        memory=_memory(result, runs),
        replay=_replay(result, recorded, played),
        findings=tuple(_finding_row(finding) for finding in findings),
        verdict=verdict(facts, findings),
        notes=(*found.notes, *job_notes(job, result, facts)),
        strips=strips(result),
        perfscope_version=__version__,
        source=str(job.path),
    )
    summary.self_check()
    return summary


def _first_step(job: Job, runs: Mapping[int, RunMetadata]) -> int | None:
    """First step of the capture analyzed that the recorder meant to be used; None for traces of other tools."""
    if job.capture is None:
        return None
    firsts = [run.captures[job.capture].first_step for run in runs.values() if job.capture < len(run.captures)]
    return max(firsts, default=None)


def _is_marked(result: Comparison) -> bool:
    return all(partial.steps.marked for partial in result.partials.values())


def _world_size(result: Comparison, runs: Mapping[int, RunMetadata]) -> int | None:
    sizes = [run.world_size for run in runs.values()]
    sizes += [partial.world_size for partial in result.partials.values() if partial.world_size is not None]
    return max(sizes, default=None)


def _missing(result: Comparison, runs: Mapping[int, RunMetadata]) -> tuple[int, ...]:
    size = _world_size(result, runs)
    return tuple(rank for rank in range(size or 0) if rank not in result.partials)


def _strategies(result: Comparison, runs: Mapping[int, RunMetadata]) -> tuple[str, ...]:
    told = {strategy for run in runs.values() for strategy in run.strategies}
    if not told:
        told = {strategy for partial in result.partials.values() for strategy in partial.strategies}
    if not told and _world_size(result, runs) == 1:
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
    hosts = dict.fromkeys(host for rank in facts.ranks if (host := _host(rank, result, runs)))
    return JobSummary(
        world_size=_world_size(result, runs),
        ranks=facts.ranks,
        missing_ranks=facts.missing_ranks,
        failures=tuple(found.failures),
        steps=tuple(int(step) for step in result.steps) if _is_marked(result) else (),
        step_time_us=facts.step_time_us,
        step_time_us_per_step=tuple(float(window) / 1e3 for window in end - start),
        strategy=strategies[0] if len(strategies) == 1 else strategies,
        backend=(first.backend if first else "") or lowest.backend or None,
        devices=device_names(result, runs),
        perturbation=facts.perturbation,
        steps_from=lowest.steps.source,
        hosts=tuple(hosts),
        command=job.launch.command if job.launch else (first.command if first else ()),
        started_at=(job.launch.started_at if job.launch else "") or (first.started_at if first else "") or None,
        model=_model(first),
        batch_shape=first.batch_shape if first else None,
        settings=dict(first.settings) if first else {},
        versions=dict(first.versions) if first and first.versions else dict(lowest.versions),
        unprofiled_step_us=unprofiled / 1e3 if unprofiled else None,
        exit_code=job.launch.exit_code if job.launch else None,
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


def _host(rank: int, result: Comparison, runs: Mapping[int, RunMetadata]) -> str:
    return runs[rank].host if rank in runs and runs[rank].host else result.partials[rank].host


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
        )
        for index, rank in enumerate(clocks.ranks)
    )


def _stragglers(
    result: Comparison, recorded: Recorded, played: Played, runs: Mapping[int, RunMetadata]
) -> tuple[StragglerRow, ...]:
    if not _is_marked(result):
        return ()
    hosts = {rank: _host(rank, result, runs) for rank in result.partials}
    return straggler_rows(result, recorded, played, hosts, complete=not _missing(result, runs))


def _replay(result: Comparison, recorded: Recorded, played: Played) -> Replay:
    """The unchanged steps, played again; only measured where they do not play to their end."""
    if not played.complete:
        return Replay(measured_step_us=result.step_ns / 1e3)
    replayed = float(recorded.slowest_ns(played).mean())
    return Replay(
        measured_step_us=result.step_ns / 1e3,
        replayed_step_us=replayed / 1e3,
        error=abs(replayed / result.step_ns - 1),
    )


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


def _memory(result: Comparison, runs: Mapping[int, RunMetadata]) -> tuple[MemoryRow, ...]:
    rows = []
    for rank, partial in sorted(result.partials.items()):
        device = runs[rank].device if rank in runs else None
        peak = device.peak_bytes if device and device.peak_bytes is not None else partial.peak_memory_bytes
        listed = next((entry.memory_bytes for entry in partial.devices), None)
        capacity = device.capacity_bytes if device and device.capacity_bytes is not None else listed
        if peak is not None or capacity is not None:
            rows.append(MemoryRow(rank=rank, peak_bytes=peak, capacity_bytes=capacity))
    return tuple(rows)


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
            setting=finding.action.setting, old=finding.action.old, new=finding.action.new, how=finding.action.how
        ),
        predicted_step_us=None
        if predicted is None
        else {"low": predicted.low / 1e3, "mid": predicted.mid / 1e3, "high": predicted.high / 1e3},
        ceiling=finding.ceiling,
        obtained=finding.obtained.value,
        confidence=finding.confidence.value,
    )
