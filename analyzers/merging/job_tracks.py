"""The job's own tracks: what was found, its steps, its critical path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.critical_path import Stretch, walk
from perfscope.analyzers.merging.pftrace import Args, PacketSequence, Slices, Value
from perfscope.analyzers.merging.view import Windows
from perfscope.analyzers.merging.wording import step_name
from perfscope.summary import FindingRow, Summary

JOB_UUID: Final = 1
"""Number of the job's outermost track."""
_TRACK_UUIDS: Final = 10


def job_packets(summary: Summary, result: Comparison, windows: Windows, zero_ns: int, left_out: Sequence[str]) -> bytes:
    """The job's tracks. ``left_out`` says in sentences what the file does not show."""
    packets = PacketSequence(1)
    tracks = (
        ("findings", _findings(summary, windows, left_out), "What limits the job: select one for its evidence."),
        ("steps", _steps(result, windows, zero_ns), "The slowest rank's: their mean is the job's step time."),
        ("critical path", _path(result, windows, zero_ns), "The chain of dependent work that fixes the step time."),
    )
    for place, (name, slices, description) in enumerate(tracks):
        if len(slices):
            packets.slice_track(
                (place + 1) << _TRACK_UUIDS, name, slices, parent=JOB_UUID, place=place, description=description
            )
    return b"".join(packets.chunks())


def _findings(summary: Summary, windows: Windows, left_out: Sequence[str]) -> Slices:
    """The verdict over all that is shown and the findings below it, the gravest first."""
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


def _evidence(finding: FindingRow) -> Args:
    args: dict[str, Value] = {
        "rule": finding.rule,
        "severity": finding.severity,
        "confidence": finding.confidence,
        "gain": finding.obtained,
        "change": finding.action.setting,
        "how": finding.action.how,
    }
    if finding.action.new is not None:
        args["to"] = finding.action.new
    if finding.predicted_step_us is not None:
        args["predicted_step_us"] = finding.predicted_step_us["mid"]
    for row in finding.evidence:
        ranks = f", ranks {' '.join(map(str, row.ranks[:8]))}" if row.ranks else ""
        args[f"evidence: {row.what}"] = f"{row.value:.6g} {row.unit}{ranks}".strip()
    return args


def _steps(result: Comparison, windows: Windows, zero_ns: int) -> Slices:
    rank = result.slowest
    start, end = (result.clocks.to_common(rank, edge) - zero_ns for edge in result.windows[rank])
    shown = np.flatnonzero(windows.shows(start, end))
    names = [step_name(result, number) for number in result.steps[shown].tolist()]
    args: list[Args] = [{"rank": rank, "step_us": length / 1e3} for length in (end[shown] - start[shown]).tolist()]
    return Slices(*windows.clipped(start[shown], end[shown]), names, args=args)


def _path(result: Comparison, windows: Windows, zero_ns: int) -> Slices:
    """The path through the steps that are shown."""
    joined: list[Stretch] = []
    for stretch in _stretches(result):
        if joined and joined[-1][:2] == stretch[:2]:
            joined[-1] = joined[-1]._replace(end_ns=stretch.end_ns)
        else:
            joined.append(stretch)
    bounds = np.array([stretch[2:] for stretch in joined], dtype=np.int64).reshape(-1, 2) - zero_ns
    shown = np.flatnonzero(windows.shows(bounds[:, 0], bounds[:, 1]))
    start, end = windows.clipped(bounds[shown, 0], bounds[shown, 1])
    chosen = [joined[place] for place in shown.tolist()]
    args: list[Args] = [{"rank": stretch.rank, "category": stretch.row.label} for stretch in chosen]
    return Slices(start, end, [f"rank {stretch.rank}: {stretch.row.label}" for stretch in chosen], args=args)


def _stretches(result: Comparison) -> list[Stretch]:
    """The path through all used steps, as the summary adds it up, the earliest first; none where steps leave gaps."""
    rank, clocks = result.slowest, result.clocks
    start, end = result.windows[rank]
    if not np.array_equal(start[1:], end[:-1]):
        return []
    first, last = clocks.to_common(rank, int(start[0])), clocks.to_common(rank, int(end[-1]))
    return list(walk(result.partials, result.timelines, result.matched, clocks, first, last, rank))[::-1]
