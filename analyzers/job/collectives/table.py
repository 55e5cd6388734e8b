"""Collectives by group, kind, type and size: wait and transfer, bandwidth, last arriver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from perfscope.analyzers.job.blocks import Blocks
from perfscope.analyzers.job.collectives.matched import Instances, MatchedCollectives
from perfscope.analyzers.rank.collectives.collectives import POINT_TO_POINT
from perfscope.results.rows import CollectiveRow
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Int64

_BUS_FACTORS: Final[dict[str, Callable[[int], float]]] = {
    # nccl-tests, doc/PERFORMANCE.md and, for the last two, src/gather.cu and src/scatter.cu:
    # bus bandwidth = algorithm bandwidth x factor(n).
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), lambda n: (n - 1) / n),
    **dict.fromkeys(("broadcast", "reduce", *POINT_TO_POINT), lambda _: 1.0),
}


def bus_factor(kind: str, participants: int) -> float | None:
    """Bytes over the busiest link for each byte of the collective's size; None for kinds without a convention."""
    if participants < 2 or kind not in _BUS_FACTORS:
        return None
    return _BUS_FACTORS[kind](participants)


def group_size(instances: Instances, group: int) -> int:
    """Ranks of a group; 0 where not known."""
    known = instances.groups[group]
    return len(known.ranks) or known.size or 0


def instance_transfer_ns(matched: MatchedCollectives) -> Int64:
    """For each instance, the transfer: the longest of its participants, from the last arrival to the end.

    Of an exchange, the longest of its recvs: a send may end as soon as the message lies in a buffer.
    """
    size = len(matched.instances)
    longest = np.zeros(size, dtype=np.int64)
    np.maximum.at(longest, matched.instance, matched.transfer_ns)
    ranks = int(matched.rank.max(initial=0)) + 1
    received = distinct(matched.messages.instance * ranks + matched.messages.destination)
    lines = np.isin(matched.instance * ranks + matched.rank, received)
    received_ns = np.full(size, NONE, dtype=np.int64)
    np.maximum.at(received_ns, matched.instance[lines], matched.transfer_ns[lines])
    return np.where(received_ns == NONE, longest, received_ns)


def collective_rows(matched: MatchedCollectives, steps: Int64) -> tuple[CollectiveRow, ...]:
    """One row for each (group, kind, type, size), the most total transfer first; ``steps`` are those of ``matched``."""
    instances = matched.instances
    transfer = instance_transfer_ns(matched)
    alike = Blocks.of(instances.group, instances.kind, instances.dtype, instances.bytes)
    lines = Blocks.of(alike.labels()[matched.instance])
    rows = [_row(matched, steps, transfer, alike.rows(label), lines.rows(label)) for label in range(len(alike))]
    return tuple(sorted(rows, key=lambda row: -row.transfer_us * row.count))


def _row(matched: MatchedCollectives, steps: Int64, transfer_ns: Int64, chosen: Int64, lines: Int64) -> CollectiveRow:
    """The row of the instances ``chosen``, which are alike; ``lines`` are their rows in ``matched``."""
    instances = matched.instances
    first = int(chosen[0])
    group = instances.groups[instances.group[first]]
    kind = instances.kinds[instances.kind[first]]
    size = int(instances.bytes[first])
    # Instances of a single rank show neither wait nor transfer: where there are others, only those count.
    shared = instances.participants > 1
    several = bool(shared[chosen].any())
    if several:
        lines = lines[shared[matched.instance[lines]]]
    mean_transfer = float(transfer_ns[chosen[shared[chosen]] if several else chosen].mean())
    known_transfer = np.where(shared[chosen] | (not several), transfer_ns[chosen], mean_transfer)
    step = np.searchsorted(steps, instances.step[chosen])
    algorithm = size / mean_transfer if several and size > 0 and mean_transfer > 0 else None
    factor = bus_factor(kind, group_size(instances, int(instances.group[first])))
    last, counts = np.unique(instances.last_rank[chosen], return_counts=True)
    return CollectiveRow(
        group=group.name,
        ranks=group.ranks or tuple(distinct(matched.rank[lines]).tolist()),
        kind=kind,
        dtype=None if instances.dtype[first] == NONE else instances.dtypes[instances.dtype[first]],
        bytes=size if size >= 0 else None,
        count=len(chosen),
        transfer_us=mean_transfer / 1e3,
        wait_us=float(matched.wait_ns[lines].mean()) / 1e3 if several else None,
        algbw_gbps=algorithm,
        busbw_gbps=algorithm * factor if algorithm is not None and factor is not None else None,
        last_arriver={
            int(rank): float(count) / len(chosen) for rank, count in zip(last, counts, strict=True) if rank != NONE
        },
        complete=bool(instances.complete[chosen].all()),
        transfer_us_per_step=tuple((np.bincount(step, known_transfer, minlength=len(steps)) / 1e3).tolist()),
    )
