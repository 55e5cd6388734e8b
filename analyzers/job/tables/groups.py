"""The summary's table of process groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.blocks import Blocks
from perfscope.analyzers.job.collectives.group_roles import EARLY, GroupTraffic, role_by_description, role_by_traffic
from perfscope.analyzers.job.collectives.matched import MatchedCollectives
from perfscope.analyzers.job.collectives.table import instance_transfer_ns
from perfscope.analyzers.rank.collectives.collectives import UNKNOWN_GROUP, Group
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.results.categories import TimeCategory
from perfscope.results.tables import GroupRow
from perfscope.trace.trace import Float64, Int64

_AT_WORK: Final = 0.1
"""Share of the job's communication below which the group of all ranks, among others, serves minor purposes only."""


def group_rows(result: AlignedJob) -> tuple[GroupRow, ...]:
    """One row for each group in which anything ran, the busiest first."""
    matched = result.matched
    instances = matched.instances
    transfer = instance_transfer_ns(matched)
    alike = Blocks.of(instances.group)
    lines = Blocks.of(instances.group[matched.instance]) if len(instances) else alike
    begins = _position_in_step(result)
    total = float(transfer.sum())
    everyone = set(result.partials).union(*(group.ranks for group in instances.groups))
    rows = []
    for label in range(len(alike)):
        chosen, own = alike.rows(label), lines.rows(label)
        group = instances.groups[int(instances.group[chosen[0]])]
        ranks = np.unique(matched.rank[own])
        role, how = _role(result, group, chosen, own, transfer, begins)
        of_all = len(alike) > 1 and set(group.ranks) == everyone and role_by_description(group.description) is None
        if of_all and float(transfer[chosen].sum()) < _AT_WORK * total:
            role, how = "world", "all ranks, and little of the communication"
        rows.append(
            GroupRow(
                name=group.name,
                ranks=group.ranks or tuple(ranks.tolist()),
                role=role,
                role_from=how,
                comm_us=_busy_ns(matched, own) / len(ranks) / len(result.steps) / 1e3,
                across_hosts=_across_hosts(group.ranks or ranks.tolist(), result.hosts.names),
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.comm_us))


def _role(
    result: AlignedJob, group: Group, chosen: Int64, own: Int64, transfer: Int64, position: Float64 | None
) -> tuple[str, str]:
    described = role_by_description(group.description)
    if group == UNKNOWN_GROUP:
        return "unknown", "the recording does not say which ranks take part"
    role, how = role_by_traffic(_traffic(result, chosen, own, transfer, position))
    if described is None:
        return role, f"its collectives: {how}"
    if (described, role) == ("data", "shard"):
        # Data-parallel ranks that shard parameters or the optimizer's state.
        return role, f"its description, {group.description}, and its collectives: {how}"
    return described, f"its description, {group.description}"


def _traffic(result: AlignedJob, chosen: Int64, own: Int64, transfer: Int64, position: Float64 | None) -> GroupTraffic:
    instances = result.matched.instances
    kind = instances.kind[chosen]
    time = np.bincount(kind, weights=transfer[chosen], minlength=len(instances.kinds))
    share = dict(zip(instances.kinds, (time / max(time.sum(), 1.0)).tolist(), strict=True))
    size = np.maximum(instances.bytes[chosen], 1).astype(np.float64)
    reduced = instances.is_kind(("all_reduce",))[chosen]
    exchanged = instances.is_kind(("send_recv",))[chosen]
    swapped = instances.bytes[chosen][instances.is_kind(("all_to_all",))[chosen]]
    early = None
    if position is not None:
        early = float(size[reduced & (position[chosen] < EARLY)].sum() / max(size[reduced].sum(), 1.0))
    present = instances.participants[chosen]
    expected = len(instances.groups[int(instances.group[chosen[0]])].ranks)
    return GroupTraffic(
        share=share,
        per_step=len(chosen) / len(result.steps),
        early_reduced=early,
        exposed=_exposed(result, own),
        gathers_first=_gathers_first(result, chosen),
        uneven=len(np.unique(swapped[swapped > 0])) > 1,
        rings=bool(exchanged.any() and expected > 2 and (present[exchanged] == expected).all()),
    )


def _position_in_step(result: AlignedJob) -> Float64 | None:
    """When each instance began to transfer, as a share (0..1) of its step; None where nothing marks steps."""
    if not result.is_marked:
        return None
    starts, ends = (
        np.stack([result.clocks.to_common(rank, window[edge]) for rank, window in result.windows.items()])
        for edge in (0, 1)
    )
    begin, end = np.median(starts, axis=0), np.median(ends, axis=0)
    instances = result.matched.instances
    at = np.searchsorted(result.steps, instances.step)
    position: Float64 = (instances.last_arrival_ns - begin[at]) / np.maximum(end[at] - begin[at], 1.0)
    return position


def _gathers_first(result: AlignedJob, chosen: Int64) -> float | None:
    """Median number of all-gathers before the first reduce-scatter of a step; None without either."""
    instances = result.matched.instances
    gathers, scatters = (instances.is_kind((kind,))[chosen] for kind in ("all_gather", "reduce_scatter"))
    counts = []
    for step in np.unique(instances.step[chosen[scatters]]).tolist():
        inside = instances.step[chosen] == step
        # Instances are in the order of their last arrivals.
        counts.append(int(gathers[inside][: int(np.argmax(scatters[inside]))].sum()))
    return float(np.median(counts)) if counts and gathers.any() else None


def _exposed(result: AlignedJob, lines: Int64) -> float:
    """Share of a group's time on its lowest rank present in which that rank computed nothing."""
    matched = result.matched
    rank = int(matched.rank[lines].min())
    mine = lines[matched.rank[lines] == rank]
    start, end = (matched.clocks.to_own(rank, times[mine]) for times in (matched.start_ns, matched.end_ns))
    busy = Intervals.of(start, end)
    bare = result.timelines[rank].where(TimeCategory.COMM_WAIT, TimeCategory.COMM_TRANSFER).intersect(busy)
    return bare.measure() / max(busy.measure(), 1)


def _busy_ns(matched: MatchedCollectives, lines: Int64) -> float:
    """Time in which a group's collectives ran, summed over its ranks: overlapping ones count once."""
    order = lines[np.lexsort((matched.start_ns[lines], matched.rank[lines]))]
    start, end, rank = matched.start_ns[order], matched.end_ns[order], matched.rank[order]
    # Every rank's times are shifted after the rank before it, so that one running maximum serves for all.
    number = np.cumsum(np.concatenate(([False], rank[1:] != rank[:-1])))
    shift = number * (int(end.max() - start.min()) + 1)
    start, end = start + shift, np.maximum.accumulate(end + shift)
    until = np.concatenate((start[:1], end[:-1]))
    return float(np.maximum(end - np.maximum(start, until), 0).sum())


def _across_hosts(ranks: Sequence[int], hosts: Mapping[int, str]) -> bool | None:
    named = {hosts[rank] for rank in ranks if rank in hosts}
    if len(named) > 1:
        return True
    return False if named and all(rank in hosts for rank in ranks) else None
