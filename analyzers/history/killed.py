"""What ranks that were killed could not write down: their metadata is as old as their last capture, their step history
goes on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from perfscope.analyzers.history.rank_history import read
from perfscope.errors import TraceError
from perfscope.recording.history import UNPROFILED_STEPS
from perfscope.recording.job import Job
from perfscope.recording.metadata import RunMetadata


def with_unprofiled_steps(job: Job) -> Job:
    """The job in which the metadata of ranks that were killed has the unprofiled steps that their histories hold."""
    runs = {rank: _with_steps(run, job.histories.get(rank)) for rank, run in job.runs.items()}
    return replace(job, runs=runs)


def _with_steps(run: RunMetadata, path: Path | None) -> RunMetadata:
    if run.outcome != "running" or path is None:
        return run
    try:
        steps = read(path)
    except TraceError:  # the analysis of the history reports it
        return run
    if steps.attempt != run.attempt:
        return run
    unprofiled = np.rint(steps.step_us[~steps.disturbed][:UNPROFILED_STEPS] * 1e3).astype(np.int64).tolist()
    if len(unprofiled) <= len(run.steps.unprofiled_ns):
        return run
    return replace(run, steps=replace(run.steps, unprofiled_ns=tuple(unprofiled)))
