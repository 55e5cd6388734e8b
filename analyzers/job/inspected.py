"""The logs of NCCL Inspector of a job: all files read, and the Summary of a folder that holds nothing else."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Final

from perfscope.analyzers.history.steps_only import untraced_job, untraced_summary
from perfscope.analyzers.job.collectives.inspector import inspector_rows
from perfscope.analyzers.readers import inspector
from perfscope.errors import TraceError
from perfscope.recording.job import Job
from perfscope.results.communication.inspector import InspectorRow
from perfscope.results.rows import Failure, Verdict
from perfscope.results.summary import Summary
from perfscope.text import duration, percent, plural

NAMED: Final = 0.5
"""Share of all waiting from which the rank that is waited for is named."""


def job_inspector(job: Job) -> tuple[tuple[InspectorRow, ...], tuple[Failure, ...]]:
    """(rows of all logs, logs that cannot be read and what is damaged in others)."""
    operations: list[inspector.Operation] = []
    failures = []
    for path in job.inspector:
        try:
            log = inspector.read(path)
        except TraceError as error:
            failures.append(Failure(rank=None, path=str(path), error=str(error)))
            continue
        operations += log.operations
        if log.damaged:
            lost = f"{path}: {plural(log.damaged, 'line')} cannot be read; the others are used"
            failures.append(Failure(rank=None, path=str(path), error=lost))
    return inspector_rows(operations), tuple(failures)


def summarize_inspected(job: Job, rows: tuple[InspectorRow, ...], failures: tuple[Failure, ...]) -> Summary:
    """A Summary of the logs alone."""
    known = {rank for row in rows for rank in row.ranks}
    ranks = tuple(sorted(known))
    largest = max(row.size for row in rows)
    missing = tuple(rank for rank in range(largest) if rank not in known)
    info = untraced_job(
        job, ranks, missing, failures, steps_from="no steps: only what NCCL Inspector logged was recorded"
    )
    verdict = Verdict(
        headline=_headline(rows),
        healthy=False,
        unsure=True,
        first_action="Record a few steps to see what the communication costs them: perfscope run -- COMMAND.",
    )
    return untraced_summary(job, info, verdict, "No trace was recorded")


def _headline(rows: tuple[InspectorRow, ...]) -> str:
    """The share of waiting, and the rank that comes last more often than chance."""
    matched = [row for row in rows if row.matched and row.wait_us is not None]
    count = plural(sum(int(row.count) for row in rows), "operation")
    if not matched:
        return f"{count} of NCCL, none of which all ranks logged: wait and transfer cannot be told apart."
    transfer = math.fsum(row.transfer_us * row.matched for row in matched)
    wait = math.fsum((row.wait_us or 0.0) * row.matched for row in matched)
    waited_for: dict[int, float] = defaultdict(float)
    for row in matched:
        for rank, share in row.last_arriver.items():
            waited_for[rank] += share * (row.wait_us or 0.0) * row.matched * row.size
    most = max(waited_for, key=lambda rank: waited_for[rank])
    part = waited_for[most] / (math.fsum(waited_for.values()) or 1.0)
    text = f"{count} of NCCL: ranks wait for others in {percent(wait / (wait + transfer))} of the kernels' time"
    if part >= NAMED:
        return f"{text}, and {percent(part)} of that for rank {most}."
    longest = max(matched, key=lambda row: row.transfer_us * row.matched)
    kind = longest.kind.replace("_", "-")
    return f"{text}; most transfer is {kind} of {longest.group}, {duration(longest.transfer_us)} each."
