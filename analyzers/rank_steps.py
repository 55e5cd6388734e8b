"""Every rank's used steps one by one, as far as rules ask how they differ: loading, computation, work, collections."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.host_activity import COLLECTING
from perfscope.analyzers.rank import DDP_FORWARD, RankPartial
from perfscope.analyzers.timeline import Row
from perfscope.trace import Int64
from perfscope.vocabulary import FORWARD

COVERED = 0.5
"""Share of the matrix time whose FLOPs must be known for work to be compared."""


@dataclass(frozen=True)
class RankSteps:
    """One rank's used steps, in the order of the job's. Times in µs."""

    loading_us: tuple[float, ...]
    """The account's idle_dataloader."""
    compute_us: tuple[float, ...]
    collecting_us: tuple[float, ...]
    """Garbage collection in idle_host."""
    flops: tuple[float, ...] | None
    """Model FLOPs; None where shapes do not tell."""
    forward_us: tuple[float, ...] | None
    """Device work launched in the model's forward; None where nothing marks that, or without a device."""


def rank_steps(result: Comparison) -> dict[int, RankSteps]:
    """All ranks; nothing is left out."""
    return {rank: _of_rank(result, rank, partial) for rank, partial in result.partials.items()}


def _of_rank(result: Comparison, rank: int, partial: RankPartial) -> RankSteps:
    used = partial.steps.indices_of(result.steps)
    totals = result.totals[rank]
    coverage = partial.flops.coverage(used)
    return RankSteps(
        loading_us=_us(totals[:, Row.DATALOADER]),
        compute_us=_us(totals[:, Row.COMPUTE]),
        collecting_us=_us(collecting_ns(result, rank)),
        flops=tuple(partial.flops.model[:, used].sum(axis=0).tolist()) if (coverage or 0.0) >= COVERED else None,
        forward_us=_forward(partial, used),
    )


def collecting_ns(result: Comparison, rank: int) -> Int64:
    """Garbage collection in one rank's idle_host, ns in each used step."""
    start, end = result.windows[rank]
    named = result.partials[rank].named_host.get(COLLECTING)
    if named is None or len(named) == 0:
        return np.zeros(len(start), dtype=np.int64)
    return named.intersect(result.timelines[rank].where(Row.HOST)).within(start, end)


def _forward(partial: RankPartial, used: Int64) -> tuple[float, ...] | None:
    modules = partial.tables.modules
    line = next((modules.names.index(name) for name in (FORWARD, DDP_FORWARD) if name in modules.names), None)
    if line is None or not partial.has_device_work:
        return None
    return _us(modules.device_ns[line, used])


def _us(ns: Int64) -> tuple[float, ...]:
    return tuple((ns / 1e3).tolist())
