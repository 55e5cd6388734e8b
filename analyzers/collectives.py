"""Collectives by group, kind, type and size: wait and transfer, bandwidth, last arriver, and the cost model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.matching import Instances, Matched
from perfscope.summary import CollectiveRow, CostRow
from perfscope.trace import NONE, Float64, Int64

_BUS_FACTORS: Final[dict[str, Callable[[int], float]]] = {
    # nccl-tests, doc/PERFORMANCE.md: bus bandwidth = algorithm bandwidth x factor(n).
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    **dict.fromkeys(("broadcast", "reduce", "send", "recv", "send_recv"), lambda _: 1.0),
}


@dataclass(frozen=True)
class CostModel:
    """t(S) = alpha + slope · S for one group and kind: ns, ns per byte. ``residual`` is the median relative error."""

    group: int
    kind: int
    alpha_ns: float
    slope: float
    residual: float


def bus_factor(kind: str, participants: int) -> float | None:
    """Bytes over the busiest link for each byte of the collective's size; None for kinds without a convention."""
    if participants < 2 or kind not in _BUS_FACTORS:
        return None
    return _BUS_FACTORS[kind](participants)


def instance_transfer_ns(matched: Matched) -> Int64:
    """For each instance, the transfer: the longest of its participants, from the last arrival to the end."""
    longest = np.zeros(len(matched.instances), dtype=np.int64)
    np.maximum.at(longest, matched.instance, matched.transfer_ns)
    return longest


def collective_rows(matched: Matched) -> tuple[CollectiveRow, ...]:
    """One row for each (group, kind, type, size), the most total transfer first."""
    instances = matched.instances
    transfer = instance_transfer_ns(matched)
    keys = np.stack((instances.group, instances.kind, instances.dtype, instances.bytes), axis=1)
    distinct, label = np.unique(keys, axis=0, return_inverse=True)
    label = label.ravel()
    rows = [_row(matched, transfer, np.flatnonzero(label == index)) for index in range(len(distinct))]
    return tuple(sorted(rows, key=lambda row: -row.transfer_us * row.count))


def _row(matched: Matched, transfer_ns: Int64, chosen: Int64) -> CollectiveRow:
    instances = matched.instances
    first = int(chosen[0])
    group = instances.groups[instances.group[first]]
    kind = instances.kinds[instances.kind[first]]
    size = int(instances.bytes[first])
    complete = bool(instances.complete[chosen].all())
    several = bool((instances.participants[chosen] > 1).all())
    mean_transfer = float(transfer_ns[chosen].mean())
    waits = matched.wait_ns[np.isin(matched.instance, chosen)]
    algorithm = size / mean_transfer if several and size > 0 and mean_transfer > 0 else None
    factor = bus_factor(kind, len(group.ranks) or group.size or 0)
    last, counts = np.unique(instances.last_rank[chosen], return_counts=True)
    present = np.unique(matched.rank[np.isin(matched.instance, chosen)])
    return CollectiveRow(
        group=group.name,
        ranks=group.ranks or tuple(int(rank) for rank in present),
        kind=kind,
        dtype=None if instances.dtype[first] == NONE else instances.dtypes[instances.dtype[first]],
        bytes=size if size >= 0 else None,
        count=len(chosen),
        transfer_us=mean_transfer / 1e3,
        wait_us=float(waits.mean()) / 1e3 if several else None,
        algbw_gbps=algorithm,
        busbw_gbps=algorithm * factor if algorithm is not None and factor is not None else None,
        last_arriver={
            int(rank): float(count) / len(chosen) for rank, count in zip(last, counts, strict=True) if rank != NONE
        },
        complete=complete,
    )


def cost_models(matched: Matched) -> tuple[CostModel, ...]:
    """Fit t(S) = alpha + S·slope for every group and kind that moved at least two clearly different sizes."""
    instances = matched.instances
    transfer = instance_transfer_ns(matched)
    usable = instances.complete & (instances.participants > 1) & (instances.bytes > 0)
    models = []
    for group in np.unique(instances.group[usable]):
        for kind in np.unique(instances.kind[usable & (instances.group == group)]):
            chosen = usable & (instances.group == group) & (instances.kind == kind)
            fitted = _fit(instances.bytes[chosen].astype(np.float64), transfer[chosen].astype(np.float64))
            if fitted is not None:
                models.append(CostModel(int(group), int(kind), *fitted))
    return tuple(models)


def _fit(size: Float64, time: Float64) -> tuple[float, float, float] | None:
    """Theil-Sen on the median time of each size: the median slope of all pairs, then the median intercept, >= 0."""
    sizes = np.unique(size)
    if len(sizes) < 2 or sizes[-1] < 2 * sizes[0]:
        return None
    medians = np.array([np.median(time[size == value]) for value in sizes])
    low, high = np.triu_indices(len(sizes), 1)
    slope = max(float(np.median((medians[high] - medians[low]) / (sizes[high] - sizes[low]))), 0.0)
    alpha = max(float(np.median(medians - slope * sizes)), 0.0)
    predicted = alpha + slope * sizes
    residual = float(np.median(np.abs(predicted - medians) / np.maximum(medians, 1.0)))
    return alpha, slope, residual


def cost_rows(models: tuple[CostModel, ...], instances: Instances) -> tuple[CostRow, ...]:
    """The cost models as the summary shows them."""
    rows = []
    for model in models:
        group, kind = instances.groups[model.group], instances.kinds[model.kind]
        factor = bus_factor(kind, len(group.ranks) or group.size or 0)
        bandwidth = factor / model.slope if factor is not None and model.slope > 0 else None
        rows.append(
            CostRow(
                group=group.name,
                kind=kind,
                alpha_us=model.alpha_ns / 1e3,
                busbw_gbps=bandwidth,
                residual=model.residual,
            )
        )
    return tuple(rows)
