"""The reductions of gradients, as far as traces show them: number and time always, sizes where they are recorded."""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.communication.traffic import traffic
from perfscope.analyzers.rules.context import RuleContext
from perfscope.frozen import dataclass

_AVERAGES: Final = 0.5
"""Share of the all-reduces that a loop calls after the optimizer's step from which they average parameters."""


_TWO: Final = ("reduce", "broadcast")


@dataclass(frozen=True)
class GradientReductions:
    """All-reduces of the group that reduces gradients, or reductions to one rank with the broadcasts back, per step;
    ``bytes``, ``largest`` and ``alpha_us`` (latency of one, or of one of each) are None where not known.
    """

    ranks: tuple[int, ...]
    count: float
    transfer_us: float
    """Of one, mean, or of one of each."""
    largest: int | None
    """Bytes of the largest one, where all sizes are recorded."""
    bytes: float | None = None
    alpha_us: float | None = None


def returned(job: RuleContext) -> GradientReductions | None:
    """Gradients that are reduced to one rank, each with the broadcast back; None where there are none."""
    data = {row.name for row in job.summary.groups if row.role == "data"}
    rows = [row for row in job.summary.collectives if row.kind == "reduce" and row.group in data]
    count = sum(row.count for row in rows)
    if not job.returned or not count:
        return None
    alike = {(row.group, row.dtype, row.bytes) for row in rows}
    back = [
        row for row in job.summary.collectives if row.kind == "broadcast" and (row.group, row.dtype, row.bytes) in alike
    ]
    times_us = [
        sum(row.transfer_us * row.count for row in each) / sum(row.count for row in each) for each in (rows, back)
    ]
    sizes = [row.bytes for row in rows if row.bytes is not None]
    known = len(sizes) == len(rows)
    alphas_us = [each.alpha_us for kind in _TWO if (each := traffic(job, kind)) is not None]
    return GradientReductions(
        ranks=tuple(sorted({rank for row in rows for rank in row.ranks})),
        count=job.returned,
        transfer_us=sum(times_us),
        largest=max(sizes) if known else None,
        bytes=sum((row.bytes or 0) * row.count for row in rows) / job.steps if known else None,
        alpha_us=sum(each or 0.0 for each in alphas_us) if len(alphas_us) == 2 and None not in alphas_us else None,
    )


def reductions(job: RuleContext) -> GradientReductions | None:
    """Those of the busiest group; without sizes, of the group that has most of them alike. None where its collectives
    do not show that it reduces gradients, or steps are not marked.
    """
    rows = [row for row in job.summary.collectives if row.kind == "all_reduce"]
    if not rows or job.steps == 0:
        return None
    sized = traffic(job, "all_reduce")
    group = sized.group if sized is not None else max(rows, key=lambda row: row.count).group
    if not any(row.name == group and row.role == "data" for row in job.summary.groups):
        return None
    # Those of biases and norms are small, and many.
    mine = [row for row in rows if row.group == group]
    count = sum(row.count for row in mine)
    if _AVERAGES * count <= job.averaged * job.steps:
        return None
    sizes = [row.bytes for row in mine if row.bytes is not None]
    all_bytes = sum((row.bytes or 0) * row.count for row in mine) / job.steps if len(sizes) == len(mine) else None
    return GradientReductions(
        ranks=tuple(sorted({rank for row in mine for rank in row.ranks})),
        count=count / job.steps,
        transfer_us=sum(row.transfer_us * row.count for row in mine) / count,
        largest=max(sizes) if len(sizes) == len(mine) else None,
        bytes=sized.bytes if sized is not None else all_bytes,
        alpha_us=sized.alpha_us if sized is not None else None,
    )
