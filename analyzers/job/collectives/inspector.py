"""NCCL Inspector's logs of all ranks put together: wait, transfer and bandwidth, without a trace and without clocks.

An operation is the same on all ranks that logged its communicator and sequence number. Its kernel runs on a rank from
that rank's arrival to the end, which all share: the shortest kernel is that of the rank that came last, and the
transfer; what another rank's kernel took longer it waited. For example, of kernels of 9, 5 and 6 µs on ranks 0, 1 and
2 the transfer is 5 µs, rank 1 came last, and ranks 0 and 2 waited for 4 and 1 µs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.job.collectives.cost_model import fit
from perfscope.analyzers.job.collectives.table import bus_factor
from perfscope.analyzers.rank.collectives.communication import kind_of
from perfscope.analyzers.readers.inspector import Operation
from perfscope.grouping import grouped
from perfscope.results.communication.inspector import InspectorRow
from perfscope.results.rows import CollectiveRow, CostRow

_OF_ONE_RANK: Final = ("all_gather", "reduce_scatter")
"""Logged is what one rank gives or gets; nccl-tests counts all ranks (``inspector.cc`` does so for bandwidths)."""


def inspector_rows(operations: Sequence[Operation]) -> tuple[InspectorRow, ...]:
    """One row for each communicator, kind and size, the most total time first."""
    ranks = _global_ranks(operations)
    names = {each.communicator: each.name for each in operations if each.name}
    alike = grouped(
        ((each.communicator, each.size, kind_of(each.operation), each.bytes, each.p2p), each) for each in operations
    )
    rows = [_row(names.get(key[0], key[0]), key[2], of_kind, ranks) for key, of_kind in alike.items()]
    return tuple(sorted(rows, key=lambda row: (-row.count * row.longest_us, row.group, row.kind, row.bytes)))


def inspector_costs(rows: Sequence[InspectorRow]) -> tuple[CostRow, ...]:
    """The cost model of each communicator and kind with sizes that tell latency from bandwidth."""
    found = []
    for (group, kind, size), alike in grouped(((row.group, row.kind, row.size), row) for row in rows).items():
        rated = [row for row in alike if row.bytes and (row.matched or row.size == 1)]
        model = fit(
            np.array([row.bytes for row in rated], dtype=np.float64),
            np.array([row.transfer_us for row in rated], dtype=np.float64),
        ) if rated else None  # fmt: skip
        factor = bus_factor(kind, size)
        if model is not None:
            alpha, slope, residual = model
            bandwidth = factor / slope / 1e3 if factor is not None and slope > 0 else None
            found.append(CostRow(group=group, kind=kind, alpha_us=alpha, busbw_gbps=bandwidth, residual=residual))
    return tuple(found)


def as_collectives(rows: Sequence[InspectorRow]) -> tuple[CollectiveRow, ...]:
    """The rows as those of traces are shown, for a job without traces."""
    return tuple(
        CollectiveRow(
            group=row.group,
            ranks=row.ranks,
            kind=row.kind,
            dtype=None,
            bytes=row.bytes,
            count=int(row.count),
            transfer_us=row.transfer_us,
            wait_us=row.wait_us,
            algbw_gbps=row.algbw_gbps,
            busbw_gbps=row.busbw_gbps,
            last_arriver=row.last_arriver,
            complete=row.matched == row.count,
        )
        for row in rows
    )


def _global_ranks(operations: Sequence[Operation]) -> dict[tuple[str, int], int]:
    """Process -> its rank in the largest communicator, which is the job's, where all processes are in it."""
    processes = {(each.host, each.process) for each in operations}
    largest = max((each.size for each in operations), default=0)
    known = {(each.host, each.process): each.rank for each in operations if each.size == largest and each.rank >= 0}
    whole = known.keys() == processes and len(set(known.values())) == len(known)
    return known if whole else {}


def _row(group: str, kind: str, alike: Sequence[Operation], ranks: dict[tuple[str, int], int]) -> InspectorRow:
    """The row of operations that are alike."""
    first = alike[0]
    numbered = grouped((each.sequence, each) for each in alike)
    together = [
        by_rank
        for each in numbered.values()
        if not first.p2p and len(by_rank := {one.rank: one for one in each}) == first.size > 1
    ]
    shortest = [min(each.us for each in by_rank.values()) for by_rank in together]
    transfer = float(np.mean(shortest)) if together else _alone(alike)
    waits = [
        each.us - quickest for by_rank, quickest in zip(together, shortest, strict=True) for each in by_rank.values()
    ]
    last = Counter(
        _rank(min(by_rank.values(), key=lambda each: (each.us, each.rank)), ranks) for by_rank in together
    )  # fmt: skip
    size = first.bytes * first.size if kind in _OF_ONE_RANK else first.bytes
    algorithm = size / transfer / 1e3 if size and (together or first.p2p) else None
    factor = bus_factor(kind, first.size)
    return InspectorRow(
        group=group,
        ranks=tuple(sorted({_rank(each, ranks) for each in alike})),
        size=first.size,
        nodes=first.nodes,
        kind=kind,
        bytes=size,
        count=len(numbered) if not first.p2p else len(alike),
        matched=len(together),
        transfer_us=transfer,
        wait_us=float(np.mean(waits)) if waits else None,
        longest_us=max(each.us for each in alike),
        algbw_gbps=algorithm,
        busbw_gbps=algorithm * factor if algorithm is not None and factor is not None else None,
        last_arriver={rank: count / len(together) for rank, count in sorted(last.items())},
        algorithm=_names(each.algorithm for each in alike),
        protocol=_names(each.protocol for each in alike),
        channels=max((each.channels for each in alike), default=0) or None,
        timing=_names(each.timing for each in alike),
    )


def _alone(alike: Sequence[Operation]) -> float:
    """Without matched operations: of sends and recvs the median, else the shortest, which bounds the transfer."""
    times = [each.us for each in alike]
    return float(np.median(times)) if alike[0].p2p else min(times)


def _rank(operation: Operation, ranks: dict[tuple[str, int], int]) -> int:
    return ranks.get((operation.host, operation.process), operation.rank)


def _names(values: Iterable[str]) -> str:
    """Distinct texts, the most frequent first."""
    counted = Counter(value for value in values if value)
    return ", ".join(value for value, _ in counted.most_common())
