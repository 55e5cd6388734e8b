"""The all-reduces of gradients, as far as traces show them: number and time always, sizes where they are recorded."""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.communication.traffic import traffic
from perfscope.analyzers.rules.context import RuleContext
from perfscope.frozen import dataclass

_AVERAGES: Final = 0.5
"""Share of the all-reduces that a loop calls after the optimizer's step from which they average parameters."""


@dataclass(frozen=True)
class GradientReductions:
    """All-reduces of the group that reduces gradients, per step; ``bytes``, ``largest`` and ``alpha_us`` (latency of
    one) are None where not known.
    """

    ranks: tuple[int, ...]
    count: float
    transfer_us: float
    """Of one, mean."""
    largest: int | None
    """Bytes of the largest one, where all sizes are recorded."""
    bytes: float | None = None
    alpha_us: float | None = None


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
