"""The messages that the ranks of a pipeline exchange, and which stage each rank holds.

Activations pass one way, gradients the other. Sends and recvs serve other ends too (attention over a ring of ranks). A
group that its maker calls a pipeline's is one; where none is called so, every group with messages that is neither
called anything else nor exchanges in rings. In a ring every rank sends before its first message of a step has come, for
which all but the first stage of a pipeline wait.

In every step the first thing that a later stage does is to receive its first micro-batch from the stage before it; the
first stage sends before it receives anything. Ranks that exchange no messages have no stage::

    rank 0   send to 2                         sends first: stage 0
    rank 2   recv from 0, send to 4 …          after rank 0: stage 1
    rank 4   recv from 2, send to 2 …          after rank 2: stage 2

Ranges of micro-batches that name the stage take precedence. Where neither says, because ranks are missing from the
recording, neighbours that follow one another in their group's list of ranks have its order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.collectives.group_roles import role_by_description
from perfscope.analyzers.job.collectives.matched import MatchedCollectives
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Bool, Int64


@dataclass(frozen=True, eq=False)
class PipelineMessages:
    """Messages of the used steps as each rank recorded its end of them: parallel arrays, by rank, step, start and order
    of issue.

    ``step`` is the job's step number; ``line`` the line of ``AlignedJob.matched``, several messages of which one kernel
    may carry; times are on the rank's own clock. ``peer`` is the rank at the other end, recorded or not (NONE: not
    known from the recording, nor from the times of kernels).
    """

    rank: Int64
    step: Int64
    line: Int64
    start_ns: Int64
    end_ns: Int64
    peer: Int64
    sends: Bool
    bytes: Int64
    peer_known: Bool
    """The recording names the peer, or the only message of its kernel shows it."""

    def __len__(self) -> int:
        return len(self.rank)


def pipeline_messages(result: AlignedJob) -> PipelineMessages:
    """The messages of the used steps in groups that serve a pipeline."""
    messages, rings = _messages(result), ring_groups(result)
    if not rings:
        return messages
    instances = result.matched.instances
    kept = ~np.isin(instances.group[result.matched.instance[messages.line]], list(rings))
    return PipelineMessages(**{name: column[kept] for name, column in vars(messages).items()})


def ring_groups(result: AlignedJob) -> frozenset[int]:
    """Groups in which every rank sends before anything has come to it, in most steps; none where ranges name
    a pipeline's stages, or the group's maker does.
    """
    if any((partial.passes.stage != NONE).any() for partial in result.partials.values()):
        return frozenset()
    messages = _messages(result)
    instances = result.matched.instances
    group = instances.group[result.matched.instance[messages.line]]
    ahead: dict[int, dict[int, list[bool]]] = {}
    for own in by_rank_and_step(messages):
        for number in distinct(group[own.rows]).tolist():
            mine = group[own.rows] == number
            sends, start, end = (each[own.rows][mine] for each in (messages.sends, messages.start_ns, messages.end_ns))
            both = bool(sends.any() and not sends.all())
            first = both and bool(start[sends][0] < end[~sends][0])
            ahead.setdefault(number, {}).setdefault(own.rank, []).append(first)
    return frozenset(
        number
        for number, ranks in ahead.items()
        if len(ranks) > 1
        and role_by_description(instances.groups[number].description) != "pipeline"
        and all(2 * sum(steps) > len(steps) for steps in ranks.values())
    )


_KNOWN: Final[WeakKeyDictionary[AlignedJob, PipelineMessages]] = WeakKeyDictionary()
"""A dozen analyses ask for the same messages of a job."""


def _messages(result: AlignedJob) -> PipelineMessages:
    known = _KNOWN.get(result)
    if known is None:
        serves = _pipeline_groups(result.matched)
        # Without a group that serves one, a single rank shows that there are none.
        ranks = sorted(result.partials)[: None if serves.any() else 1]
        columns = [_of_rank(result, rank, serves) for rank in ranks]
        known = PipelineMessages(**{name: np.concatenate([each[name] for each in columns]) for name in columns[0]})
        _KNOWN[result] = known
    return known


def _pipeline_groups(matched: MatchedCollectives) -> Bool:
    """Which of the groups serve a pipeline."""
    instances = matched.instances
    exchange = instances.is_kind(("send_recv",))
    roles = [role_by_description(group.description) for group in instances.groups]
    used = np.bincount(instances.group[exchange], minlength=len(roles) or 1) > 0
    named = np.array([role == "pipeline" for role in roles] or [False], dtype=np.bool_)
    if (named & used).any():
        return named
    open_ = np.array([role in (None, "unknown") for role in roles] or [False], dtype=np.bool_)
    size = np.array([len(group.ranks) for group in instances.groups] or [0], dtype=np.int64)
    whole = instances.participants == size[instances.group] if len(instances) else exchange
    partly = np.bincount(instances.group[exchange & ~whole], minlength=len(size)) > 0
    return open_ & used & (partly | (size <= 2))


def _of_rank(result: AlignedJob, rank: int, serves: Bool) -> dict[str, NDArray[Any]]:
    matched, partial = result.matched, result.partials[rank]
    own, messages = partial.collectives, partial.collectives.messages
    lines = matched.lines_of(rank)
    line_of = np.full(len(own), NONE, dtype=np.int64)
    line_of[matched.index[lines]] = lines
    line = line_of[messages.collective]
    kept = np.flatnonzero(line != NONE)
    kept = kept[serves[matched.instances.group[matched.instance[line[kept]]]]] if len(kept) else kept
    start = own.start_ns[messages.collective[kept]]
    step = matched.instances.step[matched.instance[line[kept]]]
    order = np.lexsort((start, step))
    kept, line, start, step = kept[order], line[kept[order]], start[order], step[order]
    sends, peer = messages.sends[kept], messages.peer[kept]
    silent = peer == NONE
    peer = peer.copy()
    peer[silent] = _inferred_peers(matched, rank, matched.instance[line[silent]], sends[silent])
    alone = np.bincount(line, minlength=1)[line] == 1
    return {
        "rank": np.full(len(kept), rank, dtype=np.int64), "step": step, "line": line, "start_ns": start,
        "end_ns": own.end_ns[messages.collective[kept]], "peer": peer, "sends": sends,
        "bytes": messages.bytes[kept], "peer_known": ~silent | (alone & (peer != NONE)),
    }  # fmt: skip


def _inferred_peers(matched: MatchedCollectives, rank: int, instance: Int64, sends: Bool) -> Int64:
    """The peers of messages that do not name them: as matching paired them; where it paired the kernel only by a
    message the other way, the one rank that shares the exchange.
    """
    sent = matched.messages
    peer = np.full(len(instance), NONE, dtype=np.int64)
    for way, here, there in ((True, sent.source, sent.destination), (False, sent.destination, sent.source)):
        mine = np.flatnonzero(here == rank)
        mine = mine[np.argsort(sent.instance[mine], kind="stable")]
        place = np.searchsorted(sent.instance[mine], instance)
        known = (place < len(mine)) & (sends == way)
        known[known] &= sent.instance[mine[place[known]]] == instance[known]
        peer[known] = there[mine[place[known]]]
    two = (peer == NONE) & (matched.instances.participants[instance] == 2)
    for index in np.flatnonzero(two).tolist():
        first, behind = np.searchsorted(matched.instance, [instance[index], instance[index] + 1])
        (peer[index],) = (other for other in matched.rank[first:behind].tolist() if other != rank)
    return peer


@dataclass(frozen=True, eq=False)
class StepMessages:
    """One rank's messages of one step, in order."""

    rank: int
    step: int
    rows: slice


def by_rank_and_step(messages: PipelineMessages) -> Iterator[StepMessages]:
    """The messages of each rank and step."""
    if len(messages) == 0:
        return
    changes = (np.diff(messages.rank) != 0) | (np.diff(messages.step) != 0)
    edges = np.concatenate(([0], np.flatnonzero(changes) + 1, [len(messages)]))
    for first, behind in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        yield StepMessages(int(messages.rank[first]), int(messages.step[first]), slice(first, behind))


@dataclass(frozen=True)
class Placement:
    """``stage_of`` maps ranks to stages, 0 the first, those included that are only known as a peer.

    Stages are places in the pipeline: a rank that holds several chunks of the model holds one stage here. ``degree`` is
    the number of stages; None where not known.
    """

    stage_of: Mapping[int, int]
    degree: int | None


def stages(result: AlignedJob) -> dict[int, int]:
    """Recorded rank -> stage, 0 the first; empty where the job has no pipeline, or the order of ranks is not known."""
    placement = place(result, pipeline_messages(result))
    return {rank: stage for rank, stage in placement.stage_of.items() if rank in result.partials}


def ranks_of(stage_of: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Stage -> its ranks, ascending."""
    members = grouped((stage, rank) for rank, stage in sorted(stage_of.items()))
    return {stage: tuple(ranks) for stage, ranks in sorted(members.items())}


def place(result: AlignedJob, messages: PipelineMessages) -> Placement:
    """Place the ranks that exchange ``messages``; no rank where they do not follow one another."""
    if len(messages) == 0:
        return Placement({}, None)
    beside = _neighbours(messages)
    listed = _by_list(result, messages)
    degree = max(listed.values()) + 1 if listed else None
    stage_of = _by_ranges(result, beside) or _by_order(beside) or listed
    if not stage_of:
        return Placement({}, None)
    if any(stage_of[rank] != listed.get(rank, stage_of[rank]) for rank in stage_of):
        listed, degree = {}, None
    placed = {**listed, **_beside(stage_of, beside, degree), **stage_of}
    if len(set(placed.values())) < 2:
        return Placement({}, None)
    last = max(placed.values())
    # The last stage sends to no later one: a rank that is only known as a peer may not be the last.
    is_last = any(placed[rank] == last for rank in beside)
    return Placement(placed, degree or (last + 1 if is_last else None))


@dataclass(frozen=True)
class _Neighbours:
    """``giver``: the rank from which the first message of a step comes (NONE: this rank sends first). ``taker``: the
    other rank to which it first sends. None where not known, or where there is none.
    """

    giver: int | None
    taker: int | None


def _neighbours(messages: PipelineMessages) -> dict[int, _Neighbours]:
    """Of each rank, as in most steps."""
    givers: dict[int, Counter[int | None]] = {}
    takers: dict[int, Counter[int | None]] = {}
    for own in by_rank_and_step(messages):
        peer, sends = messages.peer[own.rows], messages.sends[own.rows]
        known = [int(other) if other != NONE else None for other in peer[:1]]
        givers.setdefault(own.rank, Counter())[NONE if sends[0] else known[0]] += 1
        sent = peer[sends][:1]
        takers.setdefault(own.rank, Counter())[int(sent[0]) if len(sent) and sent[0] != NONE else None] += 1
    neighbours = {}
    for rank, counts in givers.items():
        giver, taker = counts.most_common(1)[0][0], takers[rank].most_common(1)[0][0]
        neighbours[rank] = _Neighbours(giver, taker if taker != giver else None)
    return neighbours


def _by_ranges(result: AlignedJob, beside: Mapping[int, _Neighbours]) -> dict[int, int]:
    """By the lowest stage that the ranges of a rank's passes name; empty unless all ranks have such ranges."""
    named = {rank: result.partials[rank].passes.stage for rank in beside}
    if any(len(stage) == 0 or stage.min() == NONE for stage in named.values()):
        return {}
    return {rank: int(stage.min()) for rank, stage in named.items()}


def _by_order(beside: Mapping[int, _Neighbours]) -> dict[int, int]:
    """By the distance from the rank that sends first; empty unless every rank has one."""
    before = {rank: own.giver for rank, own in beside.items()}
    missing = Counter(own.taker for own in beside.values() if own.taker is not None and own.taker not in beside)
    for rank, own in beside.items():
        if own.taker is not None and missing[own.taker] == 1:
            before[own.taker] = rank
    stage_of: dict[int, int] = {}
    for rank in before:
        way: list[int] = [rank]
        while (giver := before.get(way[-1])) is not None and giver != NONE and giver not in way:
            way.append(giver)
        if before.get(way[-1]) == NONE:
            stage_of[rank] = len(way) - 1
    return stage_of if beside.keys() <= stage_of.keys() else {}


def _by_list(result: AlignedJob, messages: PipelineMessages) -> dict[int, int]:
    """By the order of the groups' lists of ranks, members that are not recorded included; empty unless every message
    passes between neighbours of its group's list, whose last and first are neighbours too.
    """
    matched = result.matched
    group = matched.instances.group[matched.instance[messages.line]]
    stage_of: dict[int, int] = {}
    for number in distinct(group).tolist():
        ranks = matched.instances.groups[number].ranks
        index = {rank: place for place, rank in enumerate(ranks)}
        known = (group == number) & (messages.peer != NONE)
        ways = {*zip(messages.rank[known].tolist(), messages.peer[known].tolist(), strict=True)}
        if not ranks or not all(
            one in index and other in index and abs(index[one] - index[other]) in (1, len(ranks) - 1)
            for one, other in ways
        ):
            return {}
        stage_of.update(index)
    return stage_of


def _beside(stage_of: Mapping[int, int], beside: Mapping[int, _Neighbours], degree: int | None) -> dict[int, int]:
    """Stages of ranks that are only known as a peer. After the last stage comes the first."""
    placed = {}
    for rank, own in beside.items():
        if own.giver is not None and own.giver != NONE:
            placed[own.giver] = stage_of[rank] - 1
        if own.taker is not None:
            following = stage_of[rank] + 1
            placed.setdefault(own.taker, following % degree if degree else following)
    return {rank: stage for rank, stage in placed.items() if stage >= 0}
