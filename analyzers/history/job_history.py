"""The history of a job from those of its ranks: step times, outliers, and ranks that are slow throughout."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from perfscope.analyzers.history.cost import recording_cost
from perfscope.analyzers.history.goodput import RankGoodput, job_goodput, stood_still_us
from perfscope.analyzers.history.level import is_side, step_change
from perfscope.analyzers.history.long_steps import long_steps
from perfscope.analyzers.history.own_times import OwnTimes, rank_parts, windows_left_out
from perfscope.analyzers.history.rank_history import Float64, RankFile, RankPartialHistory, bin_width, last_step
from perfscope.analyzers.history.stragglers import FEWEST_STEPS, RunStragglers, find_stragglers
from perfscope.execution import engine
from perfscope.grouping import grouped
from perfscope.recording.job import Job
from perfscope.results.history import OTHER, History, HistoryBin, OutlierStep, SlowRank
from perfscope.results.rows import Failure
from perfscope.trace.medians import median_of_others

if TYPE_CHECKING:
    from concurrent.futures import Executor

MOST_OUTLIERS: Final = 50

NOTICEABLE: Final = 0.02
"""Share of the median step from which a rank's excess over its peers is more than noise."""

FEWEST_BINS: Final = 4
"""Bins that all ranks must have in common to be compared."""

_WORKER_BYTES: Final = 100 << 20
_MEMORY_PER_BYTE: Final = 40
"""Peak memory per byte of a file: values are compressed to a fifth, and there are a few copies."""

_WORTH_SENDING: Final = 64 << 20

_FEW_RANKS: Final = 15
"""Up to so many ranks are each compared with the median of the others; of more, with that of all."""

_WAITING: Final = {
    "ddp": {"backward"},
    "fsdp": {"forward", "backward", "optimizer"},
    "zero1": {"backward", "optimizer"},
    "zero2": {"backward", "optimizer"},
    "zero3": {"forward", "backward", "optimizer"},
    "tensor": {"forward", "backward"},
    "single": set(),
}
"""Strategy -> stages in which its ranks wait for one another, so that their time is not that of the rank itself."""

_WAITING_ANYWHERE: Final = {"forward", "backward", "optimizer"}

Partials = Mapping[int, RankPartialHistory]


def job_history(
    job: Job, executor: Executor | None = None, workers: int | None = None
) -> tuple[History | None, tuple[Failure, ...]]:
    """Read every rank's history; None where there is none. A file that cannot be read is a Failure of its rank."""
    if not job.histories:
        return None, ()
    last = [_last_step(path) for path in job.histories.values()]
    width, every = bin_width(max(last)), windows_left_out(sum(last) + len(last))
    hosts = {rank: run.host for rank, run in job.runs.items()}
    files = [RankFile(rank, hosts.get(rank, ""), path) for rank, path in job.histories.items()]
    partials: dict[int, RankPartialHistory] = {}
    own: dict[int, OwnTimes] = {}
    goodput: dict[int, RankGoodput] = {}
    failures = []
    work = functools.partial(rank_parts, width=width, every=every)
    sizes = [file.path.stat().st_size for file in files]
    memory = [_WORKER_BYTES + size * _MEMORY_PER_BYTE for size in sizes]
    # Small files are not worth sending to a cluster.
    remote = executor if executor is not None and sum(sizes) > _WORTH_SENDING else None
    with engine.local_executor(memory, sum(sizes), workers) as local:
        for outcome in engine.map_items(work, files, remote or local):
            rank = outcome.item.rank
            if outcome.result is None:
                failures.append(Failure(rank=rank, path=str(outcome.item.path), error=outcome.error or "no result"))
            else:
                partials[rank] = outcome.result.history
                goodput[rank] = outcome.result.goodput
                if outcome.result.own is not None:
                    own[rank] = outcome.result.own
    if not partials:
        return None, tuple(failures)
    found = find_stragglers(dict(sorted(own.items())), hosts, peers_of(job, own))
    history = _history(job, dict(sorted(partials.items())), found)
    still = stood_still_us(job, goodput)
    spent = job_goodput(job, goodput, still or 0.0)
    counted = max(history.ranks, key=lambda row: row.steps * row.mean_us)
    again = long_steps(
        history.outliers,
        counted.steps,
        counted.steps * counted.mean_us,
        least_us=min(_longer_us(partial) for partial in partials.values()),
        compared=history.compared,
    )
    cost = recording_cost(job, history.ranks)
    change = step_change(history.bins)
    if again is not None and change is not None and is_side(change, again):
        again = None
    return (
        replace(
            history, long_steps=again, change=change, stood_still_us=still, goodput=spent, recording_cost=cost
        ),
        tuple(failures),
    )  # fmt: skip


def peers_of(job: Job, ranks: Iterable[int]) -> list[list[int]]:
    """Groups of these ranks that do the same work: those of one stage of a pipeline, else all."""
    by_stage: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(ranks):
        pipeline = job.runs[rank].settings.get("pipeline") if rank in job.runs else None
        by_stage[str(pipeline.get("stage")) if isinstance(pipeline, dict) else ""].append(rank)
    return list(by_stage.values())


def waiting_stages(strategies: Iterable[str]) -> frozenset[str]:
    """Stages in which ranks of a job with these strategies wait for one another."""
    return frozenset().union(*(_WAITING.get(strategy, _WAITING_ANYWHERE) for strategy in strategies))


def _last_step(path: Path) -> int:
    try:
        return last_step(path)
    except OSError:  # summarize_rank reports it
        return -1


def _history(job: Job, partials: Partials, found: RunStragglers | None) -> History:
    strategies = {strategy for run in job.runs.values() for strategy in run.strategies} or {"unknown"}
    waiting = waiting_stages(strategies)
    world = max((run.world_size for run in job.runs.values()), default=0)
    history = History(
        ranks=tuple(partial.row for partial in partials.values()),
        bins=_bins(partials),
        outliers=_outliers(partials, waiting, found),
        slow_ranks=() if "pipeline" in strategies or found is not None else _slow_ranks(partials, waiting),
        stragglers=found.rows if found is not None else (),
        compared=found is not None,
        missing_ranks=tuple(rank for rank in range(world) if rank not in partials),
    )
    for row in history.ranks:
        row.self_check()
    return history


def _bins(partials: Partials) -> tuple[HistoryBin, ...]:
    median: dict[int, float] = defaultdict(float)
    longest: dict[int, float] = defaultdict(float)
    stages = _means_of_stages(partials)
    for partial in partials.values():
        bins = partial.bins
        for place, middle, most in zip(bins.place.tolist(), bins.median_us, bins.max_us, strict=True):
            median[place] = max(median[place], float(middle))
            longest[place] = max(longest[place], float(most))
    width = next(iter(partials.values())).bins.width
    last = max(partial.row.last_step for partial in partials.values())
    return tuple(
        HistoryBin(
            first_step=place * width,
            last_step=min((place + 1) * width - 1, last),
            median_us=median[place],
            max_us=longest[place],
            stages_us=stages[place],
        )
        for place in sorted(median)
    )


def _means_of_stages(partials: Partials) -> dict[int, dict[str, float]]:
    """Place of a bin -> the means of the stages that all ranks measured, over the ranks that have the bin."""
    names = [
        stage
        for stage in next(iter(partials.values())).row.stages_us
        if all(stage in partial.row.stages_us for partial in partials.values())
    ]
    sums: dict[int, Float64] = defaultdict(lambda: np.zeros(len(names)))
    counts: dict[int, int] = defaultdict(int)
    for partial in partials.values():
        columns = [list(partial.row.stages_us).index(name) for name in names]
        for place, row in zip(partial.bins.place.tolist(), partial.bins.stages_us[:, columns], strict=True):
            sums[place] += row
            counts[place] += 1
    return {place: dict(zip(names, (sums[place] / counts[place]).tolist(), strict=True)) for place in sums}


def _outliers(partials: Partials, waiting: frozenset[str], found: RunStragglers | None) -> tuple[OutlierStep, ...]:
    """Steps that are outliers on any rank, with the rank and the stage that each is attributed to."""
    delays = found.delays.by_step() if found is not None else {}
    seen = grouped(
        (number, (rank, place))
        for rank, partial in partials.items()
        for place, number in enumerate(partial.outliers.number.tolist())
    )
    rows = []
    for number, where in seen.items():
        longest, place = max(where, key=lambda entry: partials[entry[0]].outliers.us[entry[1]])
        outliers = partials[longest].outliers
        rank, stage = _attributed_to(partials, where, waiting, longest)
        delay = delays.get(number)
        if (
            delay is not None
            and delay.excess_us >= float(outliers.us[place]) * (1 - 1 / float(outliers.ratio[place])) / 2
        ):
            rank, stage = delay.rank, delay.stage
        elif delay is not None and len(where) > 1:
            rank = None  # all of them take longer
        rows.append(
            OutlierStep(
                step=number,
                us=float(outliers.us[place]),
                ratio=float(outliers.ratio[place]),
                ranks=tuple(sorted(entry[0] for entry in where)),
                rank=rank,
                stage=stage,
            )
        )
    rows.sort(key=lambda row: (-row.longer_us, row.step))
    return tuple(rows[:MOST_OUTLIERS])


def _longer_us(partial: RankPartialHistory) -> float:
    """What a rank's outliers take longer than the steps around them, together, by its own clock."""
    outliers = partial.outliers
    return float((outliers.us * (1 - 1 / outliers.ratio)).sum())


def _attributed_to(
    partials: Partials, where: list[tuple[int, int]], waiting: frozenset[str], longest: int
) -> tuple[int | None, str]:
    """Rank and stage with the largest excess among stages without waiting; else the largest stage of the longest rank,
    which may wait for another. A single rank waits for nobody.
    """
    own: list[tuple[float, int, str]] = []
    of_longest: list[tuple[float, str]] = []
    total = 0.0
    for rank, place in where:
        partial = partials[rank]
        excess = partial.outliers.stages_us[place]
        total = max(total, float(excess.sum()))
        for stage, value in zip(partial.row.stages_us, excess.tolist(), strict=True):
            if stage not in waiting:
                own.append((value, -rank, stage))
            if rank == longest:
                of_longest.append((value, stage))
    measured = all("backward" in partials[rank].row.stages_us for rank, _ in where)  # else what is other waits, too
    if own and max(own)[0] >= total / 2 and (measured or max(own)[2] != OTHER or len(partials) == 1):
        _, rank, stage = max(own)
        return -rank, stage
    return (longest if len(partials) == 1 else None), max(of_longest)[1]


def _slow_ranks(partials: Partials, waiting: frozenset[str]) -> tuple[SlowRank, ...]:
    """Ranks above the median of the others in a stage, over most of the run.

    With two ranks ``other`` is not compared: there a rank may be waiting for the slow one.
    """
    places = sorted(set.intersection(*(set(partial.bins.place.tolist()) for partial in partials.values())))
    steps = min(partial.row.steps for partial in partials.values())
    if len(partials) < 2 or len(places) < FEWEST_BINS or steps < FEWEST_STEPS:
        return ()
    ranks = list(partials)
    stages = [stage for stage in partials[ranks[0]].row.stages_us if stage not in waiting]
    if len(ranks) == 2 and OTHER in stages:
        stages.remove(OTHER)
    step_us = float(np.median([partial.row.median_us for partial in partials.values()]))
    rows = []
    for stage in stages:
        if any(stage not in partial.row.stages_us for partial in partials.values()):
            continue
        matrix = np.array([_of_stage(partials[rank], stage, places) for rank in ranks])
        for rank, excess in zip(ranks, matrix - median_of_others(matrix, few=_FEW_RANKS), strict=True):
            share = float((excess >= NOTICEABLE * step_us).mean())
            if share >= 0.5:
                rows.append(
                    SlowRank(
                        rank=rank,
                        host=partials[rank].row.host,
                        stage=stage,
                        excess_us=float(excess.mean()),
                        share_of_run=share,
                    )
                )
    return tuple(sorted(rows, key=lambda row: -row.excess_us))


def _of_stage(partial: RankPartialHistory, stage: str, places: list[int]) -> Float64:
    """Mean of a stage in each of the bins that all ranks have."""
    wanted = np.searchsorted(partial.bins.place, places)
    values: Float64 = partial.bins.stages_us[wanted, list(partial.row.stages_us).index(stage)]
    return values
