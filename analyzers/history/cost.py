"""What recording takes of every step: from what each rank measured of itself."""

from __future__ import annotations

from collections.abc import Iterable

from perfscope.recording.job import Job
from perfscope.recording.metadata import RecordingMetadata
from perfscope.results.history import RankHistory, RecordingCost


def recording_cost(job: Job, ranks: Iterable[RankHistory]) -> RecordingCost | None:
    """Of the rank where it is the largest share of the step; None where no rank measured it."""
    rows = [
        _cost(row, run.recording)
        for row in ranks
        if (run := job.runs.get(row.rank)) is not None and run.recording is not None and row.median_us > 0
    ]
    return max(rows, key=lambda row: row.share, default=None)


def _cost(row: RankHistory, measured: RecordingMetadata) -> RecordingCost:
    steps = max(measured.steps, 1)
    between = measured.between_ns / 1000
    phases = measured.phase_ns * measured.phases / steps / 1000
    waits = measured.wait_ns * measured.waits / steps / 1000
    return RecordingCost(
        rank=row.rank,
        step_us=between + phases + waits,
        share=(between + phases + waits) / row.median_us,
        between_us=between,
        phases_us=phases,
        waits_us=waits,
        thread_us=measured.thread_ns / max(measured.thread_steps, 1) / 1000,
    )
