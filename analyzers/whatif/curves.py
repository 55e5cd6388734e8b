"""Predicted step time over the values of the settings that one would turn: how far, and where it stops helping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.summary_tables import CurvePoint, CurveRow

MIB: Final = 1 << 20
BUCKET_MIB: Final = (1, 2, 5, 10, 25, 50, 100, 200, 400, 800)
"""Bucket sizes that are tried; torch's default is 25."""
MOST_RANKS: Final = 64
"""Beyond these curves take longer than the rest of the analysis."""
MANY_RANKS: Final = 16
"""From here every second value is left out."""
TIE: Final = 0.02
"""Step times closer than this are the same (noise): what is set stays, else the lowest value wins."""
MOST_BUCKETS: Final = 6_000
"""Buckets of all ranks and steps up to which a size is tried: some tenths of a second."""
_DEFAULTS: Final = {"ddp.bucket_cap_mb": 25.0}
"""What is taken to be set where nothing recorded it."""
_FLAT: Final = 0.002
"""A setting whose values differ by less than this share of the step is not worth a picture."""
_MOST_WORKERS: Final = 16
_MOST_TIMES: Final = 4
"""At most this many times as many micro-batches, and down to half."""


def curves(facts: JobFacts, recommended: Iterable[Mapping[str, str]] = ()) -> tuple[CurveRow, ...]:
    """A curve for each setting that this job has and that can be replayed; ``recommended`` values are among its points.

    None for jobs of more than ``MOST_RANKS`` ranks, or with ranks missing from the recording, and where the setting
    makes no difference.
    """
    if facts.predict is None or len(facts.ranks) > MOST_RANKS or facts.missing_ranks or facts.steps == 0:
        return ()
    asked = {name: float(value) for change in recommended for name, value in change.items() if _is_number(value)}
    tunable = (
        ("ddp.bucket_cap_mb", "MiB", bucket_cap(facts), bucket_sizes(facts)),
        ("dataloader.num_workers", "workers", _workers(facts), _worker_numbers(facts)),
        ("pipeline.microbatches", "micro-batches", _microbatches(facts), _microbatch_numbers(facts)),
    )
    found = (_curve(facts, name, unit, current, values, asked.get(name)) for name, unit, current, values in tunable)
    return tuple(curve for curve in found if curve is not None)


def bucket_sizes(facts: JobFacts) -> tuple[int, ...]:
    """Sizes of DDP's buckets to try, MiB: up to one bucket for all gradients; none where torch's DDP is not at work."""
    rows = [row for row in facts.collectives if row.kind == "all_reduce" and row.bytes]
    if not facts.torch_ddp or not rows or facts.steps == 0 or len(facts.ranks) > MOST_RANKS:
        return ()
    moved = sum((row.bytes or 0) * row.count for row in rows) / facts.steps / MIB
    most = MOST_BUCKETS / (facts.steps * len(facts.ranks))
    sizes = [size for size in BUCKET_MIB[:: 2 if len(facts.ranks) > MANY_RANKS else 1] if moved / size <= most]
    # The first that holds them all is the last that differs.
    return tuple(size for at, size in enumerate(sizes) if at == 0 or sizes[at - 1] < moved)


def bucket_cap(facts: JobFacts) -> float | None:
    """``bucket_cap_mb`` as the run recorded it."""
    for run in facts.runs.values():
        value = run.settings.get("ddp", {}).get("bucket_cap_mb")
        if isinstance(value, int | float):
            return float(value)
    return None


def _workers(facts: JobFacts) -> float | None:
    known = [row.num_workers for row in facts.dataloader if row.num_workers is not None]
    return float(max(known)) if known else None


def _worker_numbers(facts: JobFacts) -> tuple[int, ...]:
    """Powers of two up to the cores that each rank has; none where what a batch costs is not known."""
    if not facts.dataloader or any(row.batch_us is None for row in facts.dataloader):
        return ()
    cores = [run.cpu_count // max(run.local_world_size, 1) for run in facts.runs.values() if run.cpu_count]
    most = min(min(cores, default=_MOST_WORKERS), _MOST_WORKERS)
    return (0, *(count for count in (1, 2, 3, 4, 6, 8, 12, 16) if count <= max(most, 1)))


def _microbatches(facts: JobFacts) -> float | None:
    count = facts.pipeline.microbatches if facts.pipeline is not None else None
    return None if count is None else float(count)


def _microbatch_numbers(facts: JobFacts) -> tuple[int, ...]:
    now = facts.pipeline.microbatches if facts.pipeline is not None else None
    if now is None:
        return ()
    return tuple(dict.fromkeys(max(round(now * times), 1) for times in (0.5, 1, 1.5, 2, 3, _MOST_TIMES)))


def _curve(
    facts: JobFacts, name: str, unit: str, current: float | None, values: tuple[int, ...], asked: float | None
) -> CurveRow | None:
    """None where fewer than two values can be replayed, or all come out alike."""
    if not values:
        return None
    tried = sorted({float(value) for value in values} | {value for value in (current, asked) if value is not None})
    # At the current value nothing is changed: the curve goes through the measured step.
    changes = {value: {} if value == current else {name: f"{value:g}"} for value in tried}
    points = tuple(point for value in tried if (point := _point(facts, value, changes[value])) is not None)
    steps = [point.mid_us for point in points]
    if len(points) < 2 or max(steps) - min(steps) < _FLAT * facts.step_time_us:
        return None
    keep = _DEFAULTS.get(name) if current is None else current
    return CurveRow(setting=name, unit=unit, current=current, best=_best(points, keep), points=points)


def _point(facts: JobFacts, value: float, change: Mapping[str, str]) -> CurvePoint | None:
    assert facts.predict is not None
    found = facts.predict(change)
    if found is None:
        return None
    return CurvePoint(value=value, low_us=found.low / 1e3, mid_us=found.mid / 1e3, high_us=found.high / 1e3)


def _best(points: tuple[CurvePoint, ...], keep: float | None) -> float:
    least = min(point.mid_us for point in points)
    good = [point.value for point in points if point.mid_us <= (1 + TIE) * least]
    return keep if keep is not None and keep in good else good[0]


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()
