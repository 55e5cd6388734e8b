"""Measures of each step of a job, as curves over the training's own step numbers: what ``tensorboard`` writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from perfscope.analyzers.analyze import JobAnalysis, job_analysis
from perfscope.analyzers.history import rank_history
from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.merge.choice import MOST_RANKS, choose_ranks, requested_numbers
from perfscope.analyzers.read_ranks import Progress
from perfscope.errors import TraceError, UnusableInput
from perfscope.recording import remote
from perfscope.recording.history import unpack
from perfscope.recording.job import Job
from perfscope.recording.role_jobs import open_main
from perfscope.results.categories import TimeCategory
from perfscope.results.scalars import Curves, Point
from perfscope.results.summary import Summary
from perfscope.trace.trace import Float64, Int64

STEP: Final = "perfscope/step_ms"
MFU: Final = "perfscope/mfu"
MEMORY: Final = "perfscope/memory_peak_gb"
STRAGGLER_COST: Final = "perfscope/straggler_cost_ms"
SHARE: Final = "perfscope/share/"
EXPOSED: Final = "perfscope/share/exposed_comm"
OVERLAPPED: Final = "perfscope/share/overlapped_comm"
HISTORY: Final = "perfscope/run/"

MOST_POINTS: Final = 10_000
"""Points of a run's history; TensorBoard itself shows 1,000 of a curve by default."""


def job_curves(
    path: str | Path,
    *,
    ranks: str | None = None,
    capture: int | None = None,
    executor: Executor | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Iterator[Curves]:
    """Curves of the job at ``path`` and of its ranks: each capture, then the whole run where its history is recorded.

    By default, ``ranks`` are the most informative ones and ``capture`` is every capture. The other arguments and the
    errors are those of ``perfscope.analyze``.
    """
    captures: Sequence[int | None] = [capture]
    if capture is None:
        with _opened(path) as job:
            # Captures may have no numbers, and a recording may have no trace.
            captures = job.captures or ([None] if job.sources else [])
    if not captures:
        yield from _without_trace(path, ranks)
    for number in captures:
        with job_analysis(path, capture=number, executor=executor, workers=workers, progress=progress) as analysis:
            shown = choose_ranks(ranks, analysis.summary, analysis.replay.result)
            yield from capture_curves(analysis, shown, f"capture-{number or 0}")
            if number == captures[-1]:
                yield from _histories(analysis.job, shown)


def capture_curves(analysis: JobAnalysis, ranks: Sequence[int], source: str) -> Iterator[Curves]:
    """Curves of one capture: the job's first, then each rank's. Raises UnusableInput where nothing marks steps."""
    result, summary = analysis.replay.result, analysis.summary
    if not summary.job.steps:
        raise UnusableInput(
            f"{analysis.job.path}: nothing in the recording marks steps, so there are no curves over steps"
        )
    yield Curves("job", source, _job_points(result, summary))
    for rank in sorted(ranks):
        yield Curves(f"rank-{rank}", source, _rank_points(result, summary, rank))


@contextmanager
def _opened(path: str | Path) -> Iterator[Job]:
    """The job at ``path``; its files stay readable inside the context, even from a URL."""
    with remote.opened(path) as folder:
        yield open_main(folder)


def _without_trace(path: str | Path, ranks: str | None) -> Iterator[Curves]:
    """Curves of a recording with step times only: by default of the first ranks."""
    with _opened(path) as job:
        known = sorted(job.histories)
        if ranks is None or ranks == "all":
            yield from _histories(job, known if ranks else known[:MOST_RANKS])
        else:
            yield from _histories(job, requested_numbers(ranks, "--ranks", known))


def _job_points(result: AlignedJob, summary: Summary) -> tuple[Point, ...]:
    """The job's steps; shares are means over the ranks."""
    shares = np.mean([_shares(result, rank) for rank in result.partials], axis=0)
    overlapped = np.mean([_overlapped(result, rank) for rank in result.partials], axis=0)
    start, end = result.job_windows
    points = _points(result, (start, end - start), shares, overlapped)
    if (mfu := summary.utilisation.mfu) is not None:
        mean = sum(point.values[STEP] for point in points) / len(points)
        for point in points:
            # Every step has the same FLOPs; only its duration varies.
            point.values[MFU] = mfu * mean / point.values[STEP]
    cost = max(row.lost_us for row in summary.stragglers) / 1e3 if summary.stragglers else None
    return _with_last(points, {MEMORY: _largest(row.peak_bytes for row in summary.memory), STRAGGLER_COST: cost})


def _rank_points(result: AlignedJob, summary: Summary, rank: int) -> tuple[Point, ...]:
    cost = sum(row.lost_us for row in summary.stragglers if row.rank == rank) / 1e3 if summary.stragglers else None
    memory = _largest(row.peak_bytes for row in summary.memory if row.rank == rank)
    start, end = result.windows[rank]
    begin = result.clocks.to_common(rank, start)
    points = _points(result, (begin, end - start), _shares(result, rank), _overlapped(result, rank))
    return _with_last(points, {MEMORY: memory, STRAGGLER_COST: cost})


def _points(result: AlignedJob, steps: tuple[Int64, Int64], shares: Float64, overlapped: Float64) -> list[Point]:
    """``steps``: begin on the common clock, and length."""
    begins, lengths = (edge.tolist() for edge in steps)
    return [
        Point(number, begin / 1e9, _step_values(length, shares[index], overlapped[index]))
        for index, (number, begin, length) in enumerate(zip(result.steps.tolist(), begins, lengths, strict=True))
    ]


def _step_values(length_ns: float, shares: Float64, overlapped: float) -> dict[str, float]:
    values = {STEP: float(length_ns) / 1e6}
    values |= {f"{SHARE}{row.id}": float(shares[row]) for row in TimeCategory}
    values[EXPOSED] = float(shares[TimeCategory.COMM_WAIT] + shares[TimeCategory.COMM_TRANSFER])
    values[OVERLAPPED] = float(overlapped)
    return values


def _with_last(points: list[Point], once: dict[str, float | None]) -> tuple[Point, ...]:
    """Adds the values of the whole capture at its last step."""
    points[-1].values.update({tag: value for tag, value in once.items() if value is not None})
    return tuple(points)


def _shares(result: AlignedJob, rank: int) -> Float64:
    """(steps, categories): each category's share of the step."""
    totals = result.totals[rank]
    shares: Float64 = totals / np.maximum(totals.sum(axis=1, keepdims=True), 1)
    return shares


def _overlapped(result: AlignedJob, rank: int) -> Float64:
    """Share of each step with overlapped communication."""
    totals = result.totals[rank]
    exposed = totals[:, [TimeCategory.COMM_WAIT, TimeCategory.COMM_TRANSFER]].sum(axis=1)
    overlapped: Float64 = (result.communication[rank] - exposed) / np.maximum(totals.sum(axis=1), 1)
    return overlapped


def _largest(sizes: Iterable[int | None]) -> float | None:
    known = [size for size in sizes if size is not None]
    return max(known) / 1e9 if known else None


def _histories(job: Job, ranks: Sequence[int]) -> Iterator[Curves]:
    """All steps of the run, profiled or not, of the ranks with a history. A file that cannot be read is left out."""
    for rank in sorted(set(ranks) & set(job.histories)):
        path = job.histories[rank]
        try:
            steps = rank_history.read(path)
        except TraceError:
            continue
        began = next(unpack(path.read_bytes())).began_ns
        stages = [*steps.stages, "other"]
        stride = -(-len(steps.number) // MOST_POINTS)
        first = np.arange(0, len(steps.number), stride)
        sizes = np.diff(np.append(first, len(steps.number)))
        time = began / 1e9 + np.concatenate(([0.0], np.cumsum(steps.step_us)[:-1])) / 1e6
        columns = np.column_stack((steps.step_us, steps.stages_us)) / 1e3
        means = np.add.reduceat(columns, first, axis=0) / sizes[:, None]
        tags = [f"{HISTORY}{name}_ms" for name in ("step", *stages)]
        yield Curves(
            f"rank-{rank}",
            "history",
            tuple(
                Point(number, at, dict(zip(tags, values, strict=True)))
                for number, at, values in zip(
                    steps.number[first].tolist(), time[first].tolist(), means.tolist(), strict=True
                )
            ),
        )
