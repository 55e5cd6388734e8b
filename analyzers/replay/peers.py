"""Which ranks do the same work, and their own time cut where all of them are at the same point of it.

Such points are the issues of collectives that all of the peers issue: the same instance where they share it, else the
n-th of its kind in the step in groups of the same shape. Streams race, so not all of these come in the same order
everywhere; a longest sequence that does is kept. The steps' beginnings are points too, where they lie between the same
collectives on all peers (a late rank may begin a step before it issues what the others issue first).
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.pipelines.stages import stages
from perfscope.analyzers.rank.collectives.collectives import POINT_TO_POINT, Collectives
from perfscope.analyzers.rank.host_lane import pauses_as_other
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.replay.schedules import RecordedSchedules
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Bool, Float64, Int64

StepSignature = tuple[tuple[str, ...], tuple[tuple[str, int], ...]]


@dataclass(frozen=True, eq=False)
class Segments:
    """The time of ranks that do the same work, cut at the same ops of the schedules with hosts.

    ``anchors`` and ``step`` are as in ``Peers``; ``own_ns`` [rank, segment, part].
    """

    anchors: Int64
    own_ns: Int64
    step: Int64


@dataclass(frozen=True, eq=False)
class Peers:
    """Two ranks or more that do the same work, with their own time cut into the same segments.

    ``anchors`` are, for each rank (line), the ops that bound the segments (columns, one more than segments; -1 is the
    schedule's begin); ``own_ns`` [rank, segment] is its own time in each; ``step`` the index of the recorded step that
    each segment leads into, ascending; ``rows_ns`` [rank, recorded step, category] its own time by category.
    """

    ranks: tuple[int, ...]
    anchors: Int64
    own_ns: Int64
    rows_ns: Int64
    step: Int64
    on_device: Segments | None = None
    """Of the devices' own time (one part), where hosts are replayed beside them."""
    on_host: Segments | None = None
    """Of the hosts' own time, by ``HostTime``, pauses as other time."""
    slower: Mapping[int, float] = field(default_factory=dict)
    """Rank -> how many times as long its device takes for the same work, where it is slow: it stays so where the work
    of all is spread evenly."""

    @functools.cached_property
    def _lines(self) -> dict[int, int]:
        return {rank: line for line, rank in enumerate(self.ranks)}

    def line_of(self, rank: int) -> int:
        """A rank's place in ``ranks``. Raises KeyError where it is not among them."""
        return self._lines[rank]

    @functools.cached_property
    def found_waits(self) -> dict[int, tuple[Int64, Float64]]:
        """What ``pace`` has found of hosts' waits: rank -> its answer, which several ranks' pace rests on."""
        return {}

    @property
    def segments(self) -> Segments:
        """Of the own time as it happened."""
        return Segments(self.anchors, self.own_ns[:, :, None], self.step)

    def with_own_time(self, own_ns_of: Mapping[int, Int64]) -> Peers:
        """The same where the ranks' own time before each op is another one."""
        own = [np.diff(progress_at(own_ns_of[rank], at)) for rank, at in zip(self.ranks, self.anchors, strict=True)]
        return replace(self, own_ns=np.stack(own))

    @property
    def in_step_ns(self) -> Int64:
        """Own time of each rank (lines) in each recorded step (columns)."""
        return _per_step(self.own_ns, self.step, self.rows_ns.shape[1])

    def others(self, rank: int, without: Collection[int] = ()) -> list[int]:
        """Lines of the peers that ``rank`` is compared with: all but itself and ``without``; all where that leaves none
        (each is slow now and then, so the median of each step, of three or more, is a usual one, and of two the quicker
        one).
        """
        others = [index for index, peer in enumerate(self.ranks) if peer != rank and peer not in without]
        return others or list(range(len(self.ranks)))

    def target_ns(self, rank: int, without: Collection[int] = (), *, even: bool = False) -> Int64:
        """Own time of each segment at the peers' pace: the median over the others, at a pace that one of them has.
        ``even``: the mean, as where the work of all is spread evenly, which slow devices take longer for.

        The medians of many segments add up to less than any rank takes, since every rank is slow in some of them. So
        each step takes the median of the others' steps, and all steps together no less than the quickest of the others.
        """
        return self.usual_ns(self.segments, rank, without, even=even)[:, 0]

    def usual_ns(self, of: Segments, rank: int, without: Collection[int] = (), *, even: bool = False) -> Int64:
        """The same of segments in several parts: [segment, part]."""
        lines = self.others(rank, without)
        others, steps = of.own_ns[lines], self.rows_ns.shape[1]
        in_step = _per_step(others.sum(axis=2), of.step, steps)
        middle = np.mean if even else np.min if len(lines) == len(self.ranks) == 2 else np.median
        usual, typical = middle(others, axis=0), middle(in_step, axis=0)
        least = 0.0 if self.line_of(rank) in lines else float(in_step.sum(axis=1).min())
        typical = typical * max(1.0, least / max(float(typical.sum()), 1.0))
        if even:
            typical = typical + self._longer_by_device_ns(rank, lines)
        summed = _per_step(usual.sum(axis=1)[None, :], of.step, steps)[0]
        factor = np.divide(typical, summed, out=np.ones_like(typical), where=summed > 0)
        return np.asarray(usual * factor[of.step][:, None], dtype=np.int64)

    def _longer_by_device_ns(self, rank: int, lines: Sequence[int]) -> Float64:
        """[recorded step]: for how much longer than the mean of ``lines`` a rank computes with as much work as they."""
        factor = np.array([[self.slower.get(self.ranks[line], 1.0)] for line in lines])
        compute = self.rows_ns[lines, :, TimeCategory.COMPUTE]
        even = (compute / factor).mean(axis=0)
        return np.asarray(self.slower.get(rank, 1.0) * even - compute.mean(axis=0), dtype=np.float64)

    def excess_ns(self, rank: int, without: Collection[int] = ()) -> Int64:
        """[recorded step, category]: own time beyond the others' median; negative where it is quicker."""
        mine, others = self.rows_ns[self.line_of(rank)], self.rows_ns[self.others(rank, without)]
        return np.asarray(mine - np.median(others, axis=0), dtype=np.int64)


def find_peers(result: AlignedJob, recorded: RecordedSchedules) -> tuple[Peers, ...]:
    """Group the ranks by the work they do. Peers issue as many collectives of each kind in a step, and hold the same
    pipeline stage; where the stages are not known, they send and receive in the same order.
    """
    stage_of = stages(result)
    alike: dict[tuple[int | None, StepSignature], list[int]] = {}
    issues = {}
    for index, rank in enumerate(recorded.schedules.ranks):
        issues[rank] = _issues(result, recorded, index, rank)
        stage, signature = stage_of.get(rank), issues[rank].signature
        if stage is not None:  # replicas of a stage send and receive on streams that race
            signature = (), signature[1]
        alike.setdefault((stage, signature), []).append(rank)
    return tuple(
        _peers(result, recorded, ranks, [issues[rank] for rank in ranks]) for ranks in alike.values() if len(ranks) > 1
    )


def progress_at(own_ns: Int64, anchors: Int64) -> Int64:
    """Own progress at each anchor, ns; the first is the schedule's begin."""
    return np.concatenate(([0], np.cumsum(own_ns)[anchors[1:]]))


@dataclass(frozen=True, eq=False)
class _Issues:
    """What may bound one rank's segments.

    ``place`` are the ops that issue collectives, before ``end``, the op that ends the last step; ``step`` the index of
    the recorded step of each, ``instance`` its number in the schedules, ``row`` its row in ``collectives``. ``begin``
    are the ops that begin the steps. Ranks of unlike work have unlike ``signature``.
    """

    place: Int64
    step: Int64
    instance: Int64
    row: Int64
    collectives: Collectives
    begin: Int64
    end: int
    signature: StepSignature


def _issues(result: AlignedJob, recorded: RecordedSchedules, index: int, rank: int) -> _Issues:
    schedules, span = recorded.schedules, recorded.schedules.slice_of(rank)
    kind, operand = schedules.kind[span], schedules.operand[span]
    end = int(np.flatnonzero((kind == OpKind.MARK) & (operand == recorded.end[index, -1]))[0])
    place = np.flatnonzero(kind == OpKind.ISSUE)
    partial = result.partials[rank]
    row = recorded.row[operand[place]]
    step = _step_index(partial, recorded.steps, row)
    kinds = np.array(partial.collectives.kinds or ("",))[partial.collectives.kind[row]]
    signatures = Counter(_signature(kinds[step == number].tolist()) for number in range(len(recorded.steps)))
    used = (step >= 0) & (place < end)
    return _Issues(
        place=place[used],
        step=step[used],
        instance=schedules.instance[operand[place[used]]],
        row=row[used],
        collectives=partial.collectives,
        begin=np.flatnonzero((kind == OpKind.MARK) & np.isin(operand, recorded.begin[index])),
        end=end,
        # That of most steps: a collective may be issued before its step begins on one rank, and after that on another.
        signature=min(signatures, key=lambda each: (-signatures[each], each)),
    )


def _step_index(partial: RankPartial, steps: Int64, row: Int64) -> Int64:
    """Index in ``steps`` of the step in which each of a rank's collectives was issued; NONE where in none of them."""
    own = partial.collectives.step[row]
    number = np.where(own >= 0, partial.steps.number[np.maximum(own, 0)], NONE)
    index = np.minimum(np.searchsorted(steps, number), len(steps) - 1)
    return np.asarray(np.where(steps[index] == number, index, NONE), dtype=np.int64)


def _signature(kinds: list[str]) -> StepSignature:
    """Point-to-point operations in their order, which is a pipeline stage's own; of the rest how many of each, since
    independent streams may race.
    """
    between_two = tuple(kind for kind in kinds if kind in POINT_TO_POINT)
    return between_two, tuple(sorted(Counter(kinds).items()))


def _peers(result: AlignedJob, recorded: RecordedSchedules, ranks: Sequence[int], issues: Sequence[_Issues]) -> Peers:
    common = _in_common_order(_keys(issues))
    places = [mine.place[at] for mine, at in zip(issues, common, strict=True)]
    step = np.asarray(np.median([mine.step[at] for mine, at in zip(issues, common, strict=True)], axis=0), np.int64)
    step_of_issue = step
    begins, between = _begins([mine.begin for mine in issues], places)
    step = np.insert(step, between, begins - 1)
    own, rows, positions = [], [], []
    steps = len(recorded.steps)
    step = np.maximum.accumulate(np.append(step, steps - 1))
    last = np.searchsorted(step, np.arange(steps), side="right")
    for rank, mine, place in zip(ranks, issues, places, strict=True):
        anchors = np.concatenate(([-1], np.insert(place, between, mine.begin[begins]), [mine.end]))
        progress = progress_at(recorded.schedules.own_ns[recorded.schedules.slice_of(rank)], anchors)
        positions.append(anchors)
        own.append(np.diff(progress))
        rows.append(recorded.rows_between(result, rank, progress[np.concatenate(([0], last))]))
    on_device, on_host = _beside_hosts(recorded, ranks, issues, places, step_of_issue)
    return Peers(tuple(ranks), np.stack(positions), np.stack(own), np.stack(rows), step, on_device, on_host)


def _beside_hosts(
    recorded: RecordedSchedules, ranks: Sequence[int], issues: Sequence[_Issues], places: Sequence[Int64], step: Int64
) -> tuple[Segments | None, Segments | None]:
    """Segments (of devices, of hosts) between the same issues (``places`` in the schedules without hosts, ``step`` of
    each), as far as the hosts of all issue them in the same order; those of devices between steps' beginnings, too.
    """
    schedules = recorded.with_hosts
    if schedules is None:
        return None, None
    found = [_places_with_hosts(recorded, *one) for one in zip(ranks, issues, places, strict=True)]
    wanted, begins, ends = zip(*found, strict=True)
    used = np.flatnonzero(np.all([at < end for at, end in zip(wanted, ends, strict=True)], axis=0))
    kept = _in_common_order([used[np.argsort(at[used], kind="stable")] for at in wanted])[0]
    chosen = used[np.argsort(wanted[0][used], kind="stable")][kept]
    common = [at[chosen] for at in wanted]
    same, between = _begins(begins, common)
    last = len(recorded.steps) - 1
    into = np.append(step[chosen], last)
    lanes = [recorded.lanes[schedules.line_of(rank)] for rank in ranks]
    on_host = _cut([pauses_as_other(lane.rows_ns) for lane in lanes], common, ends, into)
    with_begins = [np.insert(at, between, mine[same]) for at, mine in zip(common, begins, strict=True)]
    into = np.append(np.insert(step[chosen], between, same - 1), last)
    return _cut([lane.lanes.work_ns[:, None] for lane in lanes], with_begins, ends, into), on_host


def _cut(before_ns: Sequence[Int64], places: Sequence[Int64], ends: Sequence[int], step: Int64) -> Segments:
    """Segments of each rank's time before its ops ([op, part]), cut at some of these."""
    anchors = [np.concatenate(([-1], at, [end])).astype(np.int64) for at, end in zip(places, ends, strict=True)]
    own = [
        np.diff(np.vstack((np.zeros(ns.shape[1], dtype=np.int64), np.cumsum(ns, axis=0)))[bounds + 1], axis=0)
        for ns, bounds in zip(before_ns, anchors, strict=True)
    ]
    return Segments(np.stack(anchors), np.stack(own), np.maximum.accumulate(step))


def _places_with_hosts(recorded: RecordedSchedules, rank: int, mine: _Issues, place: Int64) -> tuple[Int64, Int64, int]:
    """Where the schedules with hosts have the issues at ``place``, the steps' beginnings, the end of the last step."""
    schedules, happened = recorded.with_hosts, recorded.schedules
    assert schedules is not None
    kind, operand = (column[schedules.slice_of(rank)] for column in (schedules.kind, schedules.operand))
    wanted = happened.operand[happened.slice_of(rank)]

    def found(of_kind: OpKind, at: Int64) -> Int64:
        ops = np.flatnonzero(kind == of_kind)
        order = np.argsort(operand[ops], kind="stable")
        return np.asarray(ops[order[np.searchsorted(operand[ops], wanted[at], sorter=order)]], dtype=np.int64)

    marks = found(OpKind.MARK, np.append(mine.begin, mine.end))
    return found(OpKind.ISSUE, place), marks[:-1], int(marks[-1])


def _begins(begins: Sequence[Int64], places: Sequence[Int64]) -> tuple[Int64, Int64]:
    """(index of each step, but for the first, that begins between the same anchors on all ranks; how many of these come
    before it). ``begins`` are the ops that begin the steps, ``places`` the anchors.
    """
    before = np.stack([np.searchsorted(at, mine[1:]) for mine, at in zip(begins, places, strict=True)])
    same: Bool = (before == before[0]).all(axis=0)
    return np.flatnonzero(same) + 1, before[0][same]


def _keys(issues: Sequence[_Issues]) -> list[Int64]:
    """For each rank, a number for each of its issues, the same on all ranks for what is the same work.

    A collective in which all these ranks take part is known by its instance; the others by their step, their group's
    shape, their kind, and how many of these came before in the step.
    """
    drawn = np.concatenate([distinct(mine.instance) for mine in issues])
    instances, ranks = np.unique(drawn, return_counts=True)
    shared = instances[ranks == len(issues)]
    known: dict[tuple[object, ...], int] = {}
    keys = []
    for mine in issues:
        key = mine.instance.copy()
        others = np.flatnonzero(~np.isin(key, shared))
        if len(others):
            key[others] = [-1 - known.setdefault(each, len(known)) for each in _by_role(mine, others)]
        keys.append(key)
    return keys


def _by_role(mine: _Issues, chosen: Int64) -> list[tuple[object, ...]]:
    """(step, shape of the group, kind, number) of some issues of a rank; numbers follow the collectives' starts."""
    own = mine.collectives
    shapes = [(tuple(np.diff(group.ranks).tolist()), group.size) for group in own.groups]
    counted: Counter[tuple[object, ...]] = Counter()
    keys: dict[int, tuple[object, ...]] = {}
    for at in chosen[np.argsort(mine.row[chosen], kind="stable")].tolist():
        row = mine.row[at]
        what = int(mine.step[at]), shapes[own.group[row]], own.kinds[own.kind[row]]
        keys[at] = (*what, counted[what])
        counted[what] += 1
    return [keys[at] for at in chosen.tolist()]


def _in_common_order(keys: Sequence[Int64]) -> list[Int64]:
    """Places, for each list of keys, of a longest sequence that all of them hold in the same order."""
    order = [np.argsort(each, kind="stable") for each in keys]
    sequence = keys[0][np.sort(np.unique(keys[0], return_index=True)[1])]
    for each in keys[1:]:
        sequence = sequence[np.isin(sequence, each)]
    for each, by_key in zip(keys, order, strict=True):
        place = _places(sequence, each, by_key)
        if (np.diff(place) <= 0).any():
            sequence = sequence[_longest_ascending(place.tolist())]
    return [_places(sequence, each, by_key) for each, by_key in zip(keys, order, strict=True)]


def _places(sequence: Int64, keys: Int64, by_key: Int64) -> Int64:
    """Where each item of a sequence first is in ``keys``, which ``by_key`` sorts."""
    if len(sequence) == 0:
        return np.empty(0, dtype=np.int64)
    return np.asarray(by_key[np.searchsorted(keys, sequence, sorter=by_key)], dtype=np.int64)


def _longest_ascending(values: list[int]) -> list[int]:
    """Indices of a longest ascending part of distinct ``values`` (patience sorting)."""
    tops: list[int] = []
    at: list[int] = []
    before: list[int] = []
    for index, value in enumerate(values):
        pile = bisect_left(tops, value)
        before.append(at[pile - 1] if pile else NONE)
        if pile == len(tops):
            tops.append(value)
            at.append(index)
        else:
            tops[pile], at[pile] = value, index
    chosen = []
    index = at[-1] if at else NONE
    while index != NONE:
        chosen.append(index)
        index = before[index]
    return chosen[::-1]


def _per_step(own_ns: Int64, step: Int64, steps: int) -> Int64:
    """Sums of segments (columns) in each step."""
    before = np.concatenate((np.zeros((len(own_ns), 1), dtype=own_ns.dtype), np.cumsum(own_ns, axis=1)), axis=1)
    bounds = np.concatenate(([0], np.searchsorted(step, np.arange(steps), side="right")))
    return np.diff(before[:, bounds], axis=1)
