"""The job's blocking calls that ran devices dry, merged over the ranks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from perfscope.analyzers.comparison import Comparison


@dataclass(frozen=True, kw_only=True)
class SyncRow:
    """One place in the program at which the host waited and the device ran dry; per rank and step."""

    call: str
    """The runtime call: ``cudaStreamSynchronize`` …"""
    operator: str
    """Innermost operator that made it: ``aten::_local_scalar_dense`` …; empty for a call of the script's own."""
    inside: str
    """Innermost named range around it; empty without."""
    idle_us: float
    """Idle time charged to it, mean over all ranks and used steps."""
    count_per_step: float
    """Calls that ran the device dry."""
    ranks: tuple[int, ...]


def sync_rows(result: Comparison) -> tuple[SyncRow, ...]:
    """Every place, the costliest first."""
    idle: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    count: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    ranks: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank, partial in sorted(result.partials.items()):
        times, used = partial.tables.syncs, partial.steps.indices_of(result.steps)
        rows = zip(
            zip(times.calls, times.operators, times.ranges, strict=True),
            times.idle_ns[:, used].sum(axis=1).tolist(),
            times.count[:, used].sum(axis=1).tolist(),
            strict=True,
        )
        for place, ns, calls in rows:
            if calls:
                idle[place] += ns
                count[place] += calls
                ranks[place].append(rank)
    shares = len(result.partials) * len(result.steps)
    return tuple(
        SyncRow(
            call=place[0],
            operator=place[1],
            inside=place[2],
            idle_us=idle[place] / shares / 1e3,
            count_per_step=count[place] / shares,
            ranks=tuple(ranks[place]),
        )
        for place in sorted(idle, key=lambda place: (-idle[place], place))
    )
