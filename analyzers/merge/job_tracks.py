"""The job's own tracks: findings, steps, critical path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.critical_path import PathSegment, walk
from perfscope.analyzers.merge.choice import step_name
from perfscope.analyzers.merge.pftrace import Args, PacketSequence, Slices, Value
from perfscope.analyzers.merge.rank_view import Windows
from perfscope.results.findings import Finding, plain
from perfscope.results.summary import Summary

JOB_UUID: Final = 1
"""Id of the job's outermost track."""
_TRACK_UUIDS: Final = 10


def job_packets(summary: Summary, result: AlignedJob, windows: Windows, zero_ns: int, left_out: Sequence[str]) -> bytes:
    """The job's tracks. ``left_out``: one sentence for each thing that the file does not show."""
    packets = PacketSequence(1)
    tracks = (
        ("findings", _findings(summary, windows, left_out), "What limits the job. Select a finding for its evidence."),
        (
            "steps",
            _steps(result, windows, zero_ns),
            "The job's steps; their mean is its step time.",
        ),
        ("critical path", _path(result, windows, zero_ns), "The chain of work across ranks that fixes the step time."),
    )
    for place, (name, slices, description) in enumerate(tracks):
        if len(slices):
            packets.slice_track(
                (place + 1) << _TRACK_UUIDS, name, slices, parent=JOB_UUID, place=place, description=description
            )
    return b"".join(packets.chunks())


def _findings(summary: Summary, windows: Windows, left_out: Sequence[str]) -> Slices:
    """The verdict over the whole time shown, and below it the findings, the most severe first."""
    verdict: dict[str, Value] = {"step_time_us": summary.job.step_time_us, "ranks": len(summary.job.ranks)}
    if summary.verdict.first_action:
        verdict["first action"] = summary.verdict.first_action
    if summary.utilisation.mfu is not None:
        verdict["mfu"] = summary.utilisation.mfu
    verdict |= {f"left out {number}": text for number, text in enumerate(left_out, 1)}
    first, last = windows.hull
    size = len(summary.findings) + 1
    return Slices(
        np.full(size, first, dtype=np.int64),
        np.full(size, last, dtype=np.int64),
        [summary.verdict.headline, *(finding.title for finding in summary.findings)],
        args=[verdict, *(_evidence(finding) for finding in summary.findings)],
    )


def _evidence(finding: Finding) -> Args:
    args: dict[str, Value] = {
        "rule": finding.rule,
        "severity": finding.severity,
        "confidence": finding.confidence,
        "gain": finding.obtained,
        "change": finding.action.setting,
        "how": plain(finding.action.how),
    }
    if finding.action.new is not None:
        args["to"] = finding.action.new
    if finding.predicted_step_us is not None:
        args["predicted_step_us"] = finding.predicted_step_us.mid
    for row in finding.evidence:
        ranks = f", ranks {' '.join(map(str, row.ranks[:8]))}" if row.ranks else ""
        args[f"evidence: {row.what}"] = f"{row.value:.6g} {row.unit}{ranks}".strip()
    return args


def _steps(result: AlignedJob, windows: Windows, zero_ns: int) -> Slices:
    start, end = (edge - zero_ns for edge in result.job_windows)
    shown = np.flatnonzero(windows.shows(start, end))
    names = [step_name(result, number) for number in result.steps[shown].tolist()]
    args: list[Args] = [{"step_us": length / 1e3} for length in (end[shown] - start[shown]).tolist()]
    return Slices(*windows.clipped(start[shown], end[shown]), names, args=args)


def _path(result: AlignedJob, windows: Windows, zero_ns: int) -> Slices:
    """The critical path in the time shown; neighbours of one rank and category are merged."""
    joined: list[PathSegment] = []
    for segment in _segments(result):
        if joined and joined[-1][:2] == segment[:2]:
            joined[-1] = joined[-1]._replace(end_ns=segment.end_ns)
        else:
            joined.append(segment)
    bounds = np.array([segment[2:] for segment in joined], dtype=np.int64).reshape(-1, 2) - zero_ns
    shown = np.flatnonzero(windows.shows(bounds[:, 0], bounds[:, 1]))
    start, end = windows.clipped(bounds[shown, 0], bounds[shown, 1])
    chosen = [joined[place] for place in shown.tolist()]
    args: list[Args] = [{"rank": segment.rank, "category": segment.row.id} for segment in chosen]
    return Slices(start, end, [f"rank {segment.rank}: {segment.row.id}" for segment in chosen], args=args)


def _segments(result: AlignedJob) -> list[PathSegment]:
    """The critical path through all used steps, the earliest first; empty where there are gaps between steps."""
    start, end = result.job_windows
    if not np.array_equal(start[1:], end[:-1]):
        return []
    return list(walk(result, int(start[0]), int(end[-1]), result.last))[::-1]
