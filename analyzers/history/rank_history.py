"""One rank's step history: reads its file and reduces it to the numbers that the job's history needs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from perfscope.errors import TraceError
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.recording.history import CORE, CORE_IN, DISTURBED, OCCASIONAL, STAGES, VALUE_BYTES, PackedBlock, unpack
from perfscope.results.history import OTHER, RankHistory
from perfscope.trace.trace import Bool, Int64

Float64 = npt.NDArray[np.float64]

OUTLIER: Final = 1.5
"""A step this many times the median of its neighbours is an outlier; ``perfscope run --trigger`` defaults to it."""

NEIGHBOURS: Final = 64
"""Neighbours that a step is compared with: enough for a median, few enough to follow a run that changes."""

MOST_OUTLIERS: Final = 200
"""Outliers of one rank that are compared with those of other ranks."""

MOST_BINS: Final = 240
"""Bins of a run: as many as a picture can show."""

TREND_FROM: Final = 100
"""Number of steps from which the first and the last tenth can be compared."""

_TAIL_BYTES: Final = 1 << 16
_LONGEST_NS: Final = 1 << 61
"""Of a block: with the time at which it began it is still a number of 64 bits."""


class RankFile(NamedTuple):
    """The file of one rank; ``host`` is empty where not recorded."""

    rank: int
    host: str
    path: Path


@dataclass(frozen=True, eq=False)
class RankStepTimes:
    """One rank's steps of its last attempt, ascending by number."""

    attempt: int
    earlier_steps: int
    stages: tuple[str, ...]
    """The measured stages; ``stages_us`` has ``other`` as its last column."""
    number: Int64
    step_us: Float64
    stages_us: Float64
    """A row for each step, a column for each stage; each row adds up to the step."""
    disturbed: Bool
    waits_us: Float64 | None
    """What of ``stages_us`` was waiting for other ranks; None where that was not measured."""
    core_us: Float64
    """Waiting for a core: a column for each stage, as in ``stages_us``, and one for what may lie anywhere in the step;
    0 where it was not measured."""
    began_ns: Int64
    """When each step began, ns since the epoch; within a block as the sum of the steps before."""


@dataclass(frozen=True, eq=False)
class Bins:
    """Bins of ``width`` steps: the bin at ``place`` starts with step ``place * width``."""

    width: int
    place: Int64
    median_us: Float64
    max_us: Float64
    stages_us: Float64
    """Mean of each stage, one row for each bin."""


@dataclass(frozen=True, eq=False)
class Outliers:
    """Steps far longer than their neighbours, the largest excess first."""

    number: Int64
    us: Float64
    ratio: Float64
    stages_us: Float64
    """Excess of each stage over the median of its neighbours."""


@dataclass(frozen=True, eq=False)
class RankPartialHistory:
    """The part of one rank in the job's history."""

    row: RankHistory
    """``stages_us`` is in the order of the columns of all other ``stages_us``: ``other`` last."""
    outliers: Outliers
    bins: Bins


def last_step(path: Path) -> int:
    """The last step in a file, read from its tail; -1 where there is none."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
        tail = file.read()
    return max((block.first_step + block.steps - 1 for block in unpack(tail)), default=-1)


def bin_width(last: int) -> int:
    """Width of the bins of a run that ends with step ``last``: a power of two, so that ranks agree."""
    return 1 << max(0, int(np.ceil(np.log2(max(last + 1, 1) / MOST_BINS))))


def read(path: Path) -> RankStepTimes:
    """Read the last attempt of a file. Raises TraceError, naming the file, where it has no step."""
    return read_attempts(path)[-1]


def read_attempts(path: Path) -> list[RankStepTimes]:
    """Read a file: its attempts, the first one first. Raises TraceError, naming the file, where it has no step."""
    try:
        blocks = list(unpack(path.read_bytes()))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error}); check the path and its mode") from error
    if not blocks:
        raise TraceError(
            f"{path}: no step in the file: the job ended before the first was written, or the file is damaged"
        )
    attempts = grouped((block.attempt, block) for block in blocks)
    return [
        _steps_of(attempts[number], sum(block.steps for block in blocks if block.attempt < number))
        for number in sorted(attempts)
    ]


def _steps_of(mine: list[PackedBlock], earlier: int) -> RankStepTimes:
    """The steps of one attempt, from its blocks."""
    always = {name for name in STAGES if all(name in block.stages for block in mine)}
    now_and_then = {name for block in mine for name in block.stages if name in OCCASIONAL}
    stages = tuple(name for name in STAGES if name in always | now_and_then)
    numbers = np.concatenate([block.first_step + np.arange(block.steps, dtype=np.int64) for block in mine])
    columns = np.concatenate(
        [
            np.hstack((block_columns(block, stages), block_waits(block, stages), block_core(block, stages)))
            for block in mine
        ]
    )
    flags = np.concatenate([np.frombuffer(block.flags, np.uint8) for block in mine])
    began = np.concatenate([block.began_ns + _before(block_columns(block, ())[:, 0]) for block in mine])
    # Steps may have been renumbered: of two with one number, the later one is right.
    numbers, last = np.unique(numbers[::-1], return_index=True)
    columns, flags, began = columns[::-1][last], flags[::-1][last], began[::-1][last]
    first_core = 1 + 2 * len(stages) + 1
    step_us, stages_us = columns[:, 0], columns[:, 1 : 1 + len(stages)]
    other = step_us - stages_us.sum(axis=1)
    return RankStepTimes(
        attempt=mine[0].attempt,
        earlier_steps=earlier,
        stages=stages,
        number=numbers,
        step_us=step_us,
        stages_us=np.column_stack((stages_us, other)),
        disturbed=flags & DISTURBED != 0,
        waits_us=None if mine[-1].waits is None else columns[:, 1 + len(stages) : first_core],
        core_us=columns[:, first_core:],
        began_ns=began,
    )


def _loading_of_evaluations(steps: RankStepTimes) -> Float64:
    """``stages_us`` with the batches of evaluations counted for these: what steps with one load for longer than the
    others usually do.
    """
    if not {"dataloader", "evaluation"} <= {*steps.stages}:
        return steps.stages_us
    loading, evaluation = steps.stages.index("dataloader"), steps.stages.index("evaluation")
    evaluates = steps.stages_us[:, evaluation] > 0
    if not evaluates.any() or evaluates.all():
        return steps.stages_us
    usual = float(np.median(steps.stages_us[~evaluates, loading]))
    moved = np.where(evaluates, np.maximum(steps.stages_us[:, loading] - usual, 0), 0)
    stages_us: Float64 = steps.stages_us.copy()
    stages_us[:, loading] -= moved
    stages_us[:, evaluation] += moved
    return stages_us


def summarize_rank(file: RankFile, width: int) -> RankPartialHistory:
    """Read a file and reduce it; ``width`` is from :func:`bin_width`. Raises TraceError where the file has no step."""
    return reduce_steps(read(file.path), file, width)


def reduce_steps(steps: RankStepTimes, file: RankFile, width: int) -> RankPartialHistory:
    """Reduce what was read of ``file``."""
    used = ~steps.disturbed if not steps.disturbed.all() else np.ones(len(steps.number), dtype=bool)
    step_us, stages_us, number = steps.step_us[used], _loading_of_evaluations(steps)[used], steps.number[used]
    # Where all steps are disturbed, by a capture's start or its trace that is written, that is what makes some longer.
    count, outliers = _outliers(number, step_us, stages_us, longer=not steps.disturbed.all())
    median, p95, p99 = np.percentile(step_us, [50, 95, 99]).tolist()
    first, last = int(steps.number[0]), int(steps.number[-1])
    row = RankHistory(
        rank=file.rank,
        host=file.host,
        attempt=steps.attempt,
        earlier_steps=steps.earlier_steps,
        first_step=first,
        last_step=last,
        steps=len(number),
        disturbed_steps=len(steps.number) - len(number),
        lost_steps=last - first + 1 - len(steps.number),
        mean_us=float(step_us.mean()),
        median_us=median,
        p95_us=p95,
        p99_us=p99,
        max_us=float(step_us.max()),
        stages_us=dict(zip((*steps.stages, OTHER), stages_us.mean(axis=0).tolist(), strict=True)),
        outlier_steps=count,
        trend=_trend(step_us),
    )
    return RankPartialHistory(row, outliers, _bins(number, step_us, stages_us, width))


def block_columns(block: PackedBlock, stages: tuple[str, ...]) -> Float64:
    """A row for each step of a block; columns are the step and ``stages``, µs, 0 in a stage that it does not have."""
    return _columns(block, [0, *(_place(block.stages, 1, name) for name in stages)])


def block_waits(block: PackedBlock, stages: tuple[str, ...]) -> Float64:
    """A row for each step of a block; columns are the waits for ranks in each of these stages and in other, µs."""
    first = 1 + len(block.stages)
    return _columns(block, [_place(block.waits or (), first, name) for name in (*stages, OTHER)])


def block_core(block: PackedBlock, stages: tuple[str, ...]) -> Float64:
    """The same of waiting for a core; the last column is what may lie anywhere in the step."""
    first = 1 + len(block.stages)
    names = (*(CORE_IN[name] for name in (*stages, OTHER)), CORE)
    return _columns(block, [_place(block.waits or (), first, name) for name in names])


def _place(names: tuple[str, ...], first: int, name: str) -> int | None:
    return first + names.index(name) if name in names else None


def _columns(block: PackedBlock, wanted: list[int | None]) -> Float64:
    """Columns of a block by their place; 0 where that is None."""
    count = 1 + len(block.stages) + len(block.waits or ())
    grouped = np.frombuffer(block.columns, np.uint8).reshape(count, VALUE_BYTES, block.steps)
    values: npt.NDArray[Any] = np.ascontiguousarray(grouped.transpose(0, 2, 1)).view("<u8")[..., 0]
    chosen: Float64 = np.zeros((block.steps, len(wanted)))
    for column, place in enumerate(wanted):
        if place is not None:
            chosen[:, column] = values[place]
    return chosen


def _before(durations_us: Float64) -> Int64:
    """Time from the first step's begin to that of each, ns."""
    ends: Int64 = np.minimum(np.cumsum(durations_us) * 1000, _LONGEST_NS).astype(np.int64)
    return np.concatenate(([0], ends[:-1]))


def _around(values: Float64) -> Float64:
    """For each row the median of its neighbours, column by column."""
    edges = np.linspace(0, len(values), max(1, len(values) // NEIGHBOURS) + 1).astype(np.int64)
    medians = np.array([np.median(values[begin:end], axis=0) for begin, end in pairwise(edges)])
    around: Float64 = np.repeat(medians, np.diff(edges), axis=0)
    return around


def _outliers(number: Int64, step_us: Float64, stages_us: Float64, *, longer: bool) -> tuple[int, Outliers]:
    """Number of outliers, and the largest of them; none unless steps may be ``longer`` by themselves."""
    around = _around(step_us)
    outliers = np.flatnonzero(longer & (step_us >= OUTLIER * np.maximum(around, 1)))
    excess = step_us[outliers] - around[outliers]
    largest = outliers[np.argsort(-excess, kind="stable")[:MOST_OUTLIERS]]
    return len(outliers), Outliers(
        number=number[largest],
        us=step_us[largest],
        ratio=step_us[largest] / np.maximum(around[largest], 1),
        stages_us=stages_us[largest] - _around(stages_us)[largest],
    )


def _trend(step_us: Float64) -> float | None:
    if len(step_us) < TREND_FROM:
        return None
    tenth = len(step_us) // 10
    first = float(np.median(step_us[:tenth]))
    return float(np.median(step_us[-tenth:])) / first - 1 if first > 0 else None


def _bins(number: Int64, step_us: Float64, stages_us: Float64, width: int) -> Bins:
    places, begins = np.unique(number // width, return_index=True)
    ends = np.append(begins[1:], len(number))
    counts = (ends - begins).astype(np.float64)
    return Bins(
        width=width,
        place=places,
        median_us=np.array([np.median(step_us[begin:end]) for begin, end in zip(begins, ends, strict=True)]),
        max_us=np.maximum.reduceat(step_us, begins),
        stages_us=np.add.reduceat(stages_us, begins, axis=0) / counts[:, None],
    )
