"""What is known of each step of a job, as curves over the training's own step numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from perfscope import remote
from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.gather import Progress
from perfscope.analyzers.history import of_rank as history_of_rank
from perfscope.analyzers.merging.choice import MOST_RANKS, choose_ranks, parse_numbers
from perfscope.analyzers.timeline import Row
from perfscope.analyzers.whole import Whole, read_whole
from perfscope.errors import TraceError, UnusableInput
from perfscope.history import unpack
from perfscope.job import Job, open_job
from perfscope.scalars import Curves, Point
from perfscope.summary import Summary
from perfscope.trace import Float64

STEP: Final = "perfscope/step_ms"
MFU: Final = "perfscope/mfu"
MEMORY: Final = "perfscope/memory_peak_gb"
LOST: Final = "perfscope/lost_ms"
SHARE: Final = "perfscope/share/"
EXPOSED: Final = "perfscope/share/exposed_comm"
HIDDEN: Final = "perfscope/share/hidden_comm"
HISTORY: Final = "perfscope/run/"

MOST_POINTS: Final = 10_000
"""Of a run's history: TensorBoard itself keeps 1,000 of a curve unless told otherwise."""


def job_curves(
    path: str | Path,
    *,
    ranks: str | None = None,
    capture: int | None = None,
    executor: Executor | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Iterator[Curves]:
    """Curves of the job at ``path`` and of its ranks, capture after capture, then of the whole run where that was kept.

    ``ranks`` and ``capture`` choose; by default the most telling ranks of many, and every capture. Arguments and errors
    are otherwise those of ``perfscope.analyze``.
    """
    captures = _captures(path) if capture is None else [capture]
    if not captures:
        yield from _without_trace(path, ranks)
    for number in captures:
        with read_whole(path, capture=number, executor=executor, workers=workers, progress=progress) as whole:
            shown = choose_ranks(ranks, whole.summary, whole.compared.result)
            yield from capture_curves(whole, shown, f"capture-{number or 0}")
            if number == captures[-1]:
                yield from _histories(whole.job, shown)


def capture_curves(whole: Whole, ranks: Sequence[int], source: str) -> Iterator[Curves]:
    """Curves of one capture: the job's first, then each rank's. Raises UnusableInput where nothing marks steps."""
    result, summary = whole.compared.result, whole.summary
    if not summary.job.steps:
        raise UnusableInput(f"{whole.job.path}: nothing in the recording marks steps, so there is no curve over them")
    yield Curves("job", source, _job_points(result, summary))
    for rank in sorted(ranks):
        yield Curves(f"rank-{rank}", source, _rank_points(result, summary, rank))


def _captures(path: str | Path) -> Sequence[int | None]:
    """Numbers of the captures; None alone where there is but one of which no number is known; none without a trace."""
    with _opened(path) as job:
        return job.captures or ([None] if job.sources else [])


@contextmanager
def _opened(path: str | Path) -> Iterator[Job]:
    """The job, whose files can be read meanwhile where ``path`` is a URL."""
    if remote.is_url(str(path)):
        with remote.opened(str(path)) as folder:
            yield open_job(folder)
    else:
        yield open_job(Path(path))


def _without_trace(path: str | Path, ranks: str | None) -> Iterator[Curves]:
    """Of a recording that holds how long each step took and nothing else: the first ranks, unless they are named."""
    with _opened(path) as job:
        there = sorted(job.histories)
        wanted = () if ranks is None or ranks == "all" else parse_numbers(ranks, "--ranks")
        missing = sorted(set(wanted) - set(there))
        if missing:
            raise UnusableInput(
                f"--ranks {ranks}: no rank {missing[0]} in the recording, which has {len(there)} from {there[0]} to "
                f"{there[-1]}"
            )
        yield from _histories(job, wanted or (there if ranks == "all" else there[:MOST_RANKS]))


def _job_points(result: Comparison, summary: Summary) -> tuple[Point, ...]:
    """The slowest rank's windows, whose mean is the job's step time; shares are means over the ranks."""
    start, end = result.windows[result.slowest]
    length = (end - start).astype(np.float64)
    shares = np.mean([_shares(result, rank) for rank in result.partials], axis=0)
    hidden = np.mean([_hidden(result, rank) for rank in result.partials], axis=0)
    once: dict[str, float | None] = {MEMORY: _largest(row.peak_bytes for row in summary.memory)}
    if summary.stragglers:
        once[LOST] = max(row.lost_us for row in summary.stragglers) / 1e3
    mfu = summary.utilisation.mfu
    points = []
    for index, begins in enumerate(result.clocks.to_common(result.slowest, start).tolist()):
        values = _step_values(length[index], shares[index], hidden[index])
        if mfu is not None:
            # The same FLOPs in every step: what varies is how long they take.
            values[MFU] = mfu * float(length.mean()) / float(length[index])
        points.append(Point(int(result.steps[index]), begins / 1e9, values))
    return _with_last(points, once)


def _rank_points(result: Comparison, summary: Summary, rank: int) -> tuple[Point, ...]:
    start, end = result.windows[rank]
    shares, hidden = _shares(result, rank), _hidden(result, rank)
    once = {
        MEMORY: _largest(row.peak_bytes for row in summary.memory if row.rank == rank),
        LOST: sum(row.lost_us for row in summary.stragglers if row.rank == rank) / 1e3 if summary.stragglers else None,
    }
    points = [
        Point(int(result.steps[index]), begins / 1e9, _step_values(float(ends), shares[index], hidden[index]))
        for index, (begins, ends) in enumerate(
            zip(result.clocks.to_common(rank, start).tolist(), (end - start).tolist(), strict=True)
        )
    ]
    return _with_last(points, once)


def _step_values(length_ns: float, shares: Float64, hidden: float) -> dict[str, float]:
    values = {STEP: float(length_ns) / 1e6}
    values |= {f"{SHARE}{row.label}": float(shares[row]) for row in Row}
    values[EXPOSED] = float(shares[Row.COMM_WAIT] + shares[Row.COMM_TRANSFER])
    values[HIDDEN] = float(hidden)
    return values


def _with_last(points: list[Point], once: dict[str, float | None]) -> tuple[Point, ...]:
    """What is known of the capture as a whole stands at its last step."""
    last = points[-1]
    values = {**last.values, **{tag: value for tag, value in once.items() if value is not None}}
    return (*points[:-1], Point(last.step, last.time_s, values))


def _shares(result: Comparison, rank: int) -> Float64:
    """(steps, rows): each row's share of the step."""
    totals = result.totals[rank]
    shares: Float64 = totals / np.maximum(totals.sum(axis=1, keepdims=True), 1)
    return shares


def _hidden(result: Comparison, rank: int) -> Float64:
    """Share of each step in which communication ran behind compute."""
    totals = result.totals[rank]
    exposed = totals[:, [Row.COMM_WAIT, Row.COMM_TRANSFER]].sum(axis=1)
    hidden: Float64 = (result.communication[rank] - exposed) / np.maximum(totals.sum(axis=1), 1)
    return hidden


def _largest(sizes: Iterable[int | None]) -> float | None:
    known = [size for size in sizes if size is not None]
    return max(known) / 1e9 if known else None


def _histories(job: Job, ranks: Sequence[int]) -> Iterator[Curves]:
    """The whole run, captured or not, of the ranks that kept it. A file that cannot be read costs only itself."""
    for rank in sorted(set(ranks) & set(job.histories)):
        path = job.histories[rank]
        try:
            steps = history_of_rank.read(path)
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
