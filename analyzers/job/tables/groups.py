"""The summary's table of process groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.blocks import Blocks
from perfscope.analyzers.job.collectives.group_roles import EARLY, GroupTraffic, role_by_description, role_by_traffic
from perfscope.analyzers.job.collectives.matched import MatchedCollectives
from perfscope.analyzers.job.collectives.of_loop import collectives_of_loop, exchanges_between_steps
from perfscope.analyzers.job.collectives.returned import groups_of_returned
from perfscope.analyzers.job.collectives.table import group_size, instance_transfer_ns
from perfscope.analyzers.job.pipelines.messages import ring_groups
from perfscope.analyzers.rank.collectives.collectives import UNKNOWN_GROUP, Group
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.results.tables import GroupRow
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import Bool, Float64, Int64

_OVERLAPPED: Final = 0.1
"""Share of an all-reduce up to which compute under it is left over from before: kernels end a little late."""

_INDICES: Final = frozenset({"int32", "int64"})

_AT_WORK: Final = 0.1
"""Share of the job's communication below which the group of all ranks, among others, serves minor purposes only."""


@dataclass(frozen=True, eq=False)
class _OfAll:
    """What is found once for all groups: each collective's transfer time, ns, and the numbers of groups that are rings,
    that exchange between steps, and that broadcast back what they reduce to one rank.
    """

    transfer: Int64
    rings: frozenset[int]
    between: frozenset[int]
    returned: frozenset[int]

    @classmethod
    def of(cls, result: AlignedJob) -> _OfAll:
        partials, matched = result.partials, result.matched
        return cls(
            instance_transfer_ns(matched),
            ring_groups(result),
            exchanges_between_steps(partials, matched),
            groups_of_returned(partials, matched),
        )


def group_rows(result: AlignedJob) -> tuple[GroupRow, ...]:
    """One row for each group in which anything ran, the busiest first."""
    matched = result.matched
    instances = matched.instances
    of_all_groups = _OfAll.of(result)
    transfer = of_all_groups.transfer
    alike = Blocks.of(instances.group)
    lines = Blocks.of(instances.group[matched.instance]) if len(instances) else alike
    total = float(transfer.sum())
    of_loop = collectives_of_loop(result.partials, matched)
    everyone = set(result.partials).union(*(group.ranks for group in instances.groups))
    rows = []
    for label in range(len(alike)):
        chosen, own = alike.rows(label), lines.rows(label)
        group = instances.groups[int(instances.group[chosen[0]])]
        ranks = distinct(matched.rank[own])
        models, of_models = chosen[~of_loop[chosen]], own[~of_loop[matched.instance[own]]]
        if group_size(instances, int(instances.group[chosen[0]])) == 1:
            role, how = "unknown", "one rank alone, which exchanges nothing"
        elif len(models):
            role, how = _role(result, group, models, of_models, of_all_groups)
        else:
            role, how = "unknown", "small collectives of the training loop itself: metrics, barriers"
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


def _role(result: AlignedJob, group: Group, chosen: Int64, own: Int64, of_all: _OfAll) -> tuple[str, str]:
    described = role_by_description(group.description)
    if group == UNKNOWN_GROUP:
        return "unknown", "the recording does not say which ranks take part"
    role, how = role_by_traffic(_traffic(result, group, chosen, own, of_all))
    if described is None:
        return role, f"its collectives: {how}"
    if (described, role) == ("data", "shard"):
        # Data-parallel ranks that shard parameters or the optimizer's state.
        return role, f"its description, {group.description}, and its collectives: {how}"
    return described, f"its description, {group.description}"


def _traffic(result: AlignedJob, group: Group, chosen: Int64, own: Int64, of_all: _OfAll) -> GroupTraffic:
    instances = result.matched.instances
    number = int(instances.group[chosen[0]])
    kind = instances.kind[chosen]
    time = np.bincount(kind, weights=of_all.transfer[chosen], minlength=len(instances.kinds))
    share = dict(zip(instances.kinds, (time / max(time.sum(), 1.0)).tolist(), strict=True))
    exchanged = instances.is_kind(("send_recv",))[chosen]
    swaps = chosen[instances.is_kind(("all_to_all",))[chosen]]
    swapped = instances.bytes[swaps]
    whole = np.array([name in _INDICES for name in instances.dtypes] or [False], dtype=np.bool_)[instances.dtype[swaps]]
    reductions = waits_of(result, own, "all_reduce")
    present = instances.participants[chosen]
    expected = len(group.ranks)
    return GroupTraffic(
        share=share,
        per_step=len(chosen) / len(result.steps),
        early_reduced=_early(reductions) if result.is_marked else None,
        in_turn=in_turn(reductions),
        of_backward=_of_backward(reductions),
        replicas=set(group.ranks) >= set(result.partials)
        and all("ddp" in partial.strategies for partial in result.partials.values()),
        gathers_first=_gathers_first(result, chosen),
        alternating=_alternating(result, chosen),
        uneven=len(distinct(swapped[swapped > 0])) > 1,
        indices=float(swapped[whole & (swapped > 0)].sum()) / max(float(swapped[swapped > 0].sum()), 1.0),
        between=number in of_all.between,
        returned=number in of_all.returned,
        rings=number in of_all.rings
        or bool(exchanged.any() and expected > 2 and (present[exchanged] == expected).all()),
    )


@dataclass(frozen=True, eq=False)
class Waits:
    """A group's collectives of one kind on its lowest rank present, in order of their starts: parallel arrays.

    ``before`` and ``after`` are the compute of that rank, ns, from the start of the recorded steps to the start and to
    the end of each; ``edges`` the same at the steps' starts and the last one's end.
    """

    step: Int64
    """Index into the used steps."""
    bytes: Float64
    before: Int64
    after: Int64
    waits: Bool
    """Next to nothing is computed while it runs."""
    backward: Bool
    after_backward: Bool
    """Both as in ``Collectives``."""
    edges: Int64


def waits_of(result: AlignedJob, lines: Int64, kind: str) -> Waits:
    """A group's collectives of a kind; ``lines`` are the group's in ``result.matched``."""
    matched = result.matched
    rank = int(matched.rank[lines].min())
    mine = lines[matched.rank[lines] == rank]
    mine = mine[matched.instances.is_kind((kind,))[matched.instance[mine]]]
    mine = mine[np.argsort(matched.start_ns[mine], kind="stable")]
    start, end = (matched.clocks.to_own(rank, times[mine]) for times in (matched.start_ns, matched.end_ns))
    compute = result.timelines[rank].where(TimeCategory.COMPUTE)
    before, after = compute.before(start), compute.before(end)
    begin, finish = result.windows[rank]
    return Waits(
        step=np.searchsorted(result.steps, matched.instances.step[matched.instance[mine]]),
        bytes=np.maximum(matched.instances.bytes[matched.instance[mine]], 1).astype(np.float64),
        before=before,
        after=after,
        waits=after - before <= _OVERLAPPED * (end - start),
        backward=result.partials[rank].collectives.backward[matched.index[mine]],
        after_backward=result.partials[rank].collectives.after_backward[matched.index[mine]],
        edges=compute.before(np.append(begin, finish[-1:])),
    )


def _early(of: Waits) -> float:
    """Share of their bytes that begin in the first part (``EARLY``) of a step's compute, not after its backward: the
    optimizer's step of a small model may be most of the compute.
    """
    done = of.before - of.edges[of.step]
    early = (done < EARLY * np.diff(of.edges)[of.step]) & ~of.after_backward
    return float(of.bytes[early].sum() / max(of.bytes.sum(), 1.0))


def _of_backward(of: Waits) -> float:
    """Share of their bytes that autograd issues, or the host after it; 0 where autograd is seen to issue none."""
    if not of.backward.any():
        return 0.0
    return float(of.bytes[of.backward | of.after_backward].sum() / of.bytes.sum())


def in_turn(of: Waits) -> float:
    """Share of the compute between two that nothing overlaps, of one step; or of the bytes of such, if less."""
    pairs = of.waits[1:] & of.waits[:-1] & (of.step[1:] == of.step[:-1])
    between = np.maximum(of.before[1:] - of.after[:-1], 0)[pairs].sum()
    compute = max(int(of.edges[-1] - of.edges[0]), 1)
    return float(min(between / compute, of.bytes[of.waits].sum() / max(of.bytes.sum(), 1.0)))


def _gathers_first(result: AlignedJob, chosen: Int64) -> float | None:
    """Median number of all-gathers before the first reduce-scatter of a step; None without either."""
    instances = result.matched.instances
    gathers, scatters = (instances.is_kind((kind,))[chosen] for kind in ("all_gather", "reduce_scatter"))
    counts = []
    for step in distinct(instances.step[chosen[scatters]]).tolist():
        inside = instances.step[chosen] == step
        # Instances are in the order of their last arrivals.
        counts.append(int(gathers[inside][: int(np.argmax(scatters[inside]))].sum()))
    return float(np.median(counts)) if counts and gathers.any() else None


def _alternating(result: AlignedJob, chosen: Int64) -> float:
    """Share of neighbours in a step, among all-gathers and reduce-scatters, that are one of each."""
    instances = result.matched.instances
    kinds = [instances.is_kind((kind,))[chosen] for kind in ("all_gather", "reduce_scatter")]
    of_either = kinds[0] | kinds[1]
    is_gather, step = kinds[0][of_either], instances.step[chosen[of_either]]
    neighbours = step[1:] == step[:-1]
    changes = (is_gather[1:] != is_gather[:-1])[neighbours]
    return float(changes.mean()) if len(changes) else 0.0


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
