"""Curves: predicted step time over the values of a setting, for the settings that users tune."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from perfscope.analyzers.whatif.bucketing import MIB, bucket_cap
from perfscope.recording.metadata import RunMetadata
from perfscope.results.findings import Predict
from perfscope.results.rows import JobInfo
from perfscope.results.summary import Summary
from perfscope.results.tables import CurvePoint, CurveRow

BUCKET_MIB: Final = (1, 2, 5, 10, 25, 50, 100, 200, 400, 800)
"""Bucket sizes that are tried; torch's default is 25."""
MOST_RANKS: Final = 64
"""With more ranks curves take longer than the rest of the analysis."""
MANY_RANKS: Final = 16
"""With more ranks every second value is left out."""
TIE: Final = 0.02
"""Step times closer than this are the same (noise): the current value is the best then, else the lowest value."""
MOST_BUCKETS: Final = 6_000
"""Buckets of all ranks and steps up to which a size is tried: some tenths of a second."""
_DEFAULTS: Final = {"ddp.bucket_cap_mb": 25.0}
"""Assumed current value where none is recorded."""
_FLAT: Final = 0.002
"""A setting gets a curve where its values differ by this share of the step or more."""
_MOST_WORKERS: Final = 16
_MOST_TIMES: Final = 4
"""At most this many times as many micro-batches, and down to half."""


def curves(
    summary: Summary,
    runs: Mapping[int, RunMetadata],
    predict: Predict | None,
    recommended: Iterable[Mapping[str, str]] = (),
) -> tuple[CurveRow, ...]:
    """A curve for each setting that this job has and that can be replayed; ``recommended`` values are among its points.

    None for jobs of more than ``MOST_RANKS`` ranks, or with ranks missing from the recording, and where the setting
    makes no difference.
    """
    job = summary.job
    if predict is None or len(job.ranks) > MOST_RANKS or job.missing_ranks or not job.steps:
        return ()
    asked = {name: float(value) for change in recommended for name, value in change.items() if _is_number(value)}
    workers = [row.num_workers for row in summary.dataloader if row.num_workers is not None]
    microbatches = summary.pipeline.microbatches if summary.pipeline is not None else None
    tunable = (
        ("ddp.bucket_cap_mb", "MiB", bucket_cap(runs), bucket_sizes(summary, runs)),
        ("dataloader.num_workers", "workers", max(workers, default=None), _worker_numbers(summary, runs)),
        ("pipeline.microbatches", "micro-batches", microbatches, _microbatch_numbers(microbatches, len(job.ranks))),
    )
    drawn = (
        _curve(
            job.step_time_us, predict, name, unit, None if current is None else float(current), values, asked.get(name)
        )
        for name, unit, current, values in tunable
    )
    return tuple(curve for curve in drawn if curve is not None)


def uses_torch_ddp(job: JobInfo, runs: Mapping[int, RunMetadata]) -> bool:
    """Is torch's DistributedDataParallel at work? Frameworks that reduce gradients themselves record that."""
    own = any("implementation" in run.settings.get("ddp", {}) for run in runs.values())
    return "ddp" in job.strategies and not own


def bucket_sizes(summary: Summary, runs: Mapping[int, RunMetadata]) -> tuple[int, ...]:
    """Sizes of DDP's buckets to try, MiB: up to one bucket for all gradients; none where torch's DDP is not at work."""
    rows = [row for row in summary.collectives if row.kind == "all_reduce" and row.bytes]
    steps, ranks = len(summary.job.steps), len(summary.job.ranks)
    if not uses_torch_ddp(summary.job, runs) or not rows or steps == 0 or ranks > MOST_RANKS:
        return ()
    moved = sum((row.bytes or 0) * row.count for row in rows) / steps / MIB
    most = MOST_BUCKETS / (steps * ranks)
    sizes = [size for size in BUCKET_MIB[:: 2 if ranks > MANY_RANKS else 1] if moved / size <= most]
    # The first that holds them all is the last that differs.
    return tuple(size for at, size in enumerate(sizes) if at == 0 or sizes[at - 1] < moved)


def _worker_numbers(summary: Summary, runs: Mapping[int, RunMetadata]) -> tuple[int, ...]:
    """Powers of two up to the cores that each rank has; none where what a batch costs is not known."""
    if not summary.dataloader or any(row.batch_us is None for row in summary.dataloader):
        return ()
    cores = [run.cpu_count // max(run.local_world_size, 1) for run in runs.values() if run.cpu_count]
    most = min(min(cores, default=_MOST_WORKERS), _MOST_WORKERS)
    return (0, *(count for count in (1, 2, 3, 4, 6, 8, 12, 16) if count <= max(most, 1)))


def _microbatch_numbers(now: int | None, ranks: int) -> tuple[int, ...]:
    """Of many ranks those that ``pipeline-bubble`` asks for anyway: each takes a second for each few ranks."""
    if now is None:
        return ()
    every = (0.5, 1, 1.5, 2, 3, _MOST_TIMES) if ranks <= MANY_RANKS else (1, 2, 3, _MOST_TIMES)
    return tuple(dict.fromkeys(max(round(now * times), 1) for times in every))


def _curve(
    step_time_us: float,
    predict: Predict,
    name: str,
    unit: str,
    current: float | None,
    values: tuple[int, ...],
    asked: float | None,
) -> CurveRow | None:
    """None where fewer than two values can be replayed, or all come out alike."""
    if not values:
        return None
    tried = sorted({float(value) for value in values} | {value for value in (current, asked) if value is not None})
    # At the current value nothing is changed: the curve goes through the measured step.
    points = tuple(
        CurvePoint(value=value, low_us=step.low, mid_us=step.mid, high_us=step.high)
        for value in tried
        if (step := predict({} if value == current else {name: f"{value:g}"})) is not None
    )
    steps = [point.mid_us for point in points]
    if len(points) < 2 or max(steps) - min(steps) < _FLAT * step_time_us:
        return None
    keep = _DEFAULTS.get(name) if current is None else current
    return CurveRow(setting=name, unit=unit, current=current, best=_best(points, keep), points=points)


def _best(points: tuple[CurvePoint, ...], keep: float | None) -> float:
    least = min(point.mid_us for point in points)
    good = [point.value for point in points if point.mid_us <= (1 + TIE) * least]
    return keep if keep is not None and keep in good else good[0]


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()
