"""What a group communicates per step: how much, in how many collectives, and how much of the time is latency."""

from __future__ import annotations

from collections import Counter
from typing import Final

from perfscope.analyzers.rank.collectives.collectives import SMALLEST
from perfscope.analyzers.replay.latency import beyond_slow_link_ns
from perfscope.analyzers.rules.context import RuleContext
from perfscope.frozen import dataclass
from perfscope.results.rows import CollectiveRow

_BYTES: Final = {"float32": 4, "float64": 8}
"""Of an element; 2 for all others."""


@dataclass(frozen=True)
class CollectiveTraffic:
    """Collectives of one kind in the group that moves most of them, per step."""

    group: str
    ranks: tuple[int, ...]
    kind: str
    dtype: str | None
    """The type of most bytes."""
    count: float
    bytes: float
    largest: int
    transfer_us: float
    """Sum over the collectives, overlapped or exposed."""
    alpha_us: float | None
    """Latency of one collective: fitted, or between CPUs what those without load take, or of small ones of one size
    what a slow link would not take; None where that is not known."""
    across_hosts: bool | None

    @property
    def latency_share(self) -> float | None:
        """Latency of all collectives as a share of their transfer time."""
        if self.alpha_us is None or self.transfer_us <= 0:
            return None
        return min(self.count * self.alpha_us / self.transfer_us, 1.0)

    @property
    def element_bytes(self) -> int:
        """Of an element of ``dtype``."""
        return _BYTES.get(self.dtype or "", 2)

    @property
    def us_per_byte(self) -> float:
        """Transfer time of a byte, without latency."""
        return max(self.transfer_us - self.count * (self.alpha_us or 0.0), 0.0) / self.bytes


_OF_MODELS: Final = frozenset(("tensor", "pipeline", "context", "expert"))
"""Roles of groups that divide a model or its input: gradients and parameters travel in others."""


_GATHERED: Final = 0.5
"""Of the bytes that are reduced, from which those gathered are parameters: types of both may differ."""

_WRAPPED: Final = frozenset(("ddp", "fsdp"))
"""Strategies that ranges in a trace show, which have rules of their own."""


def traffic(job: RuleContext, *kinds: str) -> CollectiveTraffic | None:
    """The collectives of these kinds in the busiest group in which gradients and parameters travel, of the kind that
    moves most; None where there are none with their size, or steps are not marked.
    """
    apart = {group.name for group in job.summary.groups if group.role in _OF_MODELS}
    rows = [
        row
        for row in job.summary.collectives
        if row.kind in kinds and (row.bytes or 0) >= SMALLEST and row.group not in apart and not job.is_of_layers(row)
    ]
    if not rows or job.steps == 0:
        return None
    moved, by_dtype = Counter[tuple[str, str]](), Counter[str | None]()
    for row in rows:
        moved[row.group, row.kind] += _moved(row)
    group, kind = max(moved, key=moved.__getitem__)
    mine = [row for row in rows if (row.group, row.kind) == (group, kind)]
    for row in mine:
        by_dtype[row.dtype] += _moved(row)
    cost = next((row for row in job.summary.cost_model if (row.group, row.kind) == (group, kind)), None)
    return CollectiveTraffic(
        group=group,
        ranks=tuple(sorted({rank for row in mine for rank in row.ranks})),
        kind=kind,
        dtype=max(by_dtype, key=by_dtype.__getitem__),
        count=sum(row.count for row in mine) / job.steps,
        bytes=sum(map(_moved, mine)) / job.steps,
        largest=max(row.bytes or 0 for row in mine),
        transfer_us=sum(row.transfer_us * row.count for row in mine) / job.steps,
        alpha_us=_latency_us(job, group, kind, None if cost is None else cost.alpha_us),
        across_hosts=next((row.across_hosts for row in job.summary.groups if row.name == group), None),
    )


def _latency_us(job: RuleContext, group: str, kind: str, fitted_us: float | None) -> float | None:
    """Latency of one collective. A fit is of medians, which leave out that a collective may find its cores taken: the
    smallest collectives show what that costs on average, and on CPUs each one may, however little it sends.
    """
    rows = [row for row in job.summary.collectives if (row.group, row.kind) == (group, kind)]
    if fitted_us is None:
        return _beyond_slow_link_us([row for row in rows if (row.bytes or 0) >= SMALLEST])
    count = sum(row.count for row in rows if 0 < (row.bytes or 0) < SMALLEST)
    if job.on_devices or not count:
        return fitted_us
    tiny_us = sum(row.transfer_us * row.count for row in rows if 0 < (row.bytes or 0) < SMALLEST) / count
    larger_us = [row.transfer_us for row in rows if (row.bytes or 0) >= SMALLEST]
    return max(fitted_us, min(tiny_us, *larger_us))


def _beyond_slow_link_us(rows: list[CollectiveRow]) -> float | None:
    """Latency of like collectives, which separate it from bandwidth no further: what a slow link would not take for
    their bytes. None where that is less than half of what they take.
    """
    count = sum(row.count for row in rows)
    taken_us = sum(row.transfer_us * row.count for row in rows) / count
    moved = sum(map(_moved, rows)) / count
    latency_us = beyond_slow_link_ns(moved, moved, taken_us * 1e3) / 1e3
    return latency_us if latency_us > taken_us / 2 else None


def _moved(row: CollectiveRow) -> int:
    return (row.bytes or 0) * row.count


def sharded_by_unknown(job: RuleContext) -> bool:
    """Do traces without metadata show that parameters or optimizer states are sharded, and not by what? Gradients are
    scattered; or summed, and about as many bytes of parameters gathered.
    """
    strategies = set(job.info.strategies)
    if job.runs or _WRAPPED & strategies or job.steps == 0:
        return False
    if "shard" in strategies:
        return True
    reduced, gathered = traffic(job, "all_reduce"), traffic(job, "all_gather")
    if "data" not in strategies or reduced is None or gathered is None or reduced.group != gathered.group:
        return False
    return gathered.bytes >= _GATHERED * reduced.bytes
