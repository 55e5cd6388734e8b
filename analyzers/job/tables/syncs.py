"""The job's blocking calls after which a device was idle, merged over the ranks."""

from __future__ import annotations

from collections import defaultdict

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.frozen import dataclass


@dataclass(frozen=True, kw_only=True)
class SyncRow:
    """One place in the program at which the host waited and the device became idle; per rank and step."""

    call: str
    """The runtime call: ``cudaStreamSynchronize`` …"""
    operator: str
    """Innermost operator that made it: ``aten::_local_scalar_dense`` …; empty for a call of the script itself."""
    inside: str
    """Innermost named range around it; empty without."""
    idle_us: float
    """Idle time attributed to it, mean over all ranks and used steps."""
    delayed_us: float
    """Idle time that would be gone had the host not waited there, ``idle_us`` included; the mean as well."""
    count_per_step: float
    """Calls after which the device was idle."""
    ranks: tuple[int, ...]
    of_loop: bool = False
    """It reads what a collective brings that the training loop calls between the optimizer's step and the forward."""


def sync_rows(result: AlignedJob) -> tuple[SyncRow, ...]:
    """Every place, the costliest first."""
    places: defaultdict[tuple[str, str, str, bool], list[tuple[int, int, int, int]]] = defaultdict(list)
    for rank, partial in sorted(result.partials.items()):
        times, used = partial.tables.syncs, partial.steps.indices_of(result.steps)
        tables = (times.idle_ns, times.delayed_ns, times.count)
        idle_ns, delayed_ns, count = (table[:, used].sum(axis=1).tolist() for table in tables)
        for line, place in enumerate(zip(times.calls, times.operators, times.ranges, times.of_loop, strict=True)):
            if count[line]:
                places[place].append((rank, idle_ns[line], delayed_ns[line], count[line]))
    shares = len(result.partials) * len(result.steps)
    rows = [
        SyncRow(
            call=call,
            operator=operator,
            inside=inside,
            idle_us=sum(idle for _, idle, *_ in own) / shares / 1e3,
            delayed_us=sum(delayed for _, _, delayed, _ in own) / shares / 1e3,
            count_per_step=sum(count for *_, count in own) / shares,
            ranks=tuple(rank for rank, *_ in own),
            of_loop=of_loop,
        )
        for (call, operator, inside, of_loop), own in places.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.idle_us, row.call, row.operator, row.inside, row.of_loop)))
