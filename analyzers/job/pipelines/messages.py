"""The messages that the ranks of a pipeline exchange.

Activations pass one way, gradients the other. Sends and recvs serve other ends too (attention over a ring of ranks). A
group that its maker calls a pipeline's is one; where none is called so, every group with messages that is neither
called anything else nor exchanges in rings. In a ring every rank sends before its first message of a step has come, for
which all but the first stage of a pipeline wait.

Reports of nsys do not say which way a message passes. Both of its kernels end together, so that it is known which two
ranks exchange it. In each step the first message of a rank is the first micro-batch from the stage before; the first
stage alone has computed that micro-batch since its last message of the step before::

    rank 0   compute ── message to 1          has worked more before it ends: the first stage
    rank 1   (waits)    message from 0, compute ── message to 2
    rank 2                                       (waits) message from 1 …

Of the messages between two stages the first is an activation, the last a gradient, and half of all are gradients. In
which order they take turns is not known; here all activations come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from perfscope.analyzers.job.blocks import Blocks, where
from perfscope.analyzers.job.collectives.group_roles import role_by_description
from perfscope.analyzers.job.collectives.matched import EXCHANGE, MatchedCollectives
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Bool, Int64

if TYPE_CHECKING:
    from perfscope.analyzers.job.aligned import AlignedJob

_IDLE: Final = 0.8
"""Before a rank receives its first message it works for less than this share of what the sender does: both step their
optimizers, and the sender also computes its last backward and its first forward.
"""


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
    directed: bool = True
    """The recording says which way each message passes; else only the first and the last ways of a step are known."""

    def __len__(self) -> int:
        return len(self.rank)


def pipeline_messages(result: AlignedJob) -> PipelineMessages:
    """The messages of the used steps in groups that serve a pipeline."""
    messages, rings = _messages(result), ring_groups(result)
    if not rings:
        return messages
    instances = result.matched.instances
    kept = ~np.isin(instances.group[result.matched.instance[messages.line]], list(rings))
    return where(messages, kept)


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
        merged: dict[str, Any] = {name: np.concatenate([each[name] for each in columns]) for name in columns[0]}
        known = PipelineMessages(**merged)
        known = _KNOWN[result] = known if len(known) else _undirected(result)
    return known


def _undirected(result: AlignedJob) -> PipelineMessages:
    """The same where no message says which way it passes, and ranks follow one another by their first ones; none where
    any does, or they do not.
    """
    exchanged = _two_way_lines(result)
    givers = _first_givers(result, exchanged)
    ranks = sorted(givers) if NONE in givers.values() else []
    return _merged([_ways_by_order(result, rank, exchanged[rank], givers) for rank in ranks])


def _two_way_lines(result: AlignedJob) -> dict[int, Int64]:
    """Rank -> lines of ``matched`` that are messages between two ranks, by step and end; empty where messages say
    which way they pass.
    """
    matched, instances = result.matched, result.matched.instances
    if any(len(partial.collectives.messages) for partial in result.partials.values()):
        return {}
    unnamed = [role_by_description(group.description) in (None, "unknown", "pipeline") for group in instances.groups]
    open_ = np.array(unnamed or [False], dtype=np.bool_)[instances.group]
    two = open_ & instances.complete & instances.is_kind((EXCHANGE,)) & (instances.participants == 2)
    lines = np.flatnonzero(two[matched.instance]) if len(matched) else np.empty(0, np.int64)
    lines = lines[np.lexsort((matched.end_ns[lines], instances.step[matched.instance[lines]], matched.rank[lines]))]
    ranks = matched.rank[lines]
    return {rank: lines[ranks == rank] for rank in distinct(ranks).tolist()}


def _first_givers(result: AlignedJob, exchanged: Mapping[int, Int64]) -> dict[int, int]:
    """Rank -> the rank from which its first message of most steps comes; NONE for one that sends first."""
    first = {
        (rank, step): message
        for rank, lines in exchanged.items()
        for step, message in _first_messages(result, rank, lines)
    }
    givers: dict[int, Counter[int]] = {}
    for (rank, step), (peer, worked_ns) in first.items():
        back, theirs_ns = first.get((peer, step), (NONE, 0))
        sends = back == rank and theirs_ns < _IDLE * worked_ns
        givers.setdefault(rank, Counter())[NONE if sends else peer] += 1
    return {rank: counts.most_common(1)[0][0] for rank, counts in givers.items()}


def _first_messages(result: AlignedJob, rank: int, lines: Int64) -> Iterator[tuple[int, tuple[int, int]]]:
    """(step, (the rank at the other end of its first message, what this one computed from the end of the message before
    to that of this one)). A device may begin a step, as its host marks it, with work of the step before.
    """
    matched = result.matched
    step, first = np.unique(matched.instances.step[matched.instance[lines]], return_index=True)
    ends = result.partials[rank].collectives.end_ns[matched.index[lines]]
    begin = np.where(first > 0, ends[first - 1], result.windows[rank][0][np.searchsorted(result.steps, step)])
    end = ends[first]
    worked = result.timelines[rank].where(TimeCategory.COMPUTE).within(begin, np.maximum(begin, end))
    return zip(
        step.tolist(), zip(_other_end(matched, lines[first]).tolist(), worked.tolist(), strict=True), strict=True
    )


def _other_end(matched: MatchedCollectives, lines: Int64) -> Int64:
    """Lines are ordered by instance: the other of two is next to it."""
    after = np.minimum(lines + 1, len(matched) - 1)
    before = np.maximum(lines - 1, 0)
    is_after = (matched.instance[after] == matched.instance[lines]) & (after != lines)
    return np.where(is_after, matched.rank[after], matched.rank[before])


def _merged(ranks: Sequence[PipelineMessages]) -> PipelineMessages:
    """Those of several ranks, one after the other."""
    none = np.empty(0, dtype=np.int64)
    if not ranks:
        is_none = np.empty(0, dtype=np.bool_)
        return PipelineMessages(none, none, none, none, none, none, is_none, none, is_none, directed=False)
    names = [field.name for field in fields(PipelineMessages) if field.name != "directed"]
    columns: dict[str, Any] = {name: np.concatenate([getattr(each, name) for each in ranks]) for name in names}
    return replace(ranks[0], **columns)


def _ways_by_order(result: AlignedJob, rank: int, lines: Int64, givers: Mapping[int, int]) -> PipelineMessages:
    """One rank's messages, with the ways that the order of the ranks gives them."""
    matched = result.matched
    own, peer = result.partials[rank].collectives, _other_end(matched, lines)
    step = matched.instances.step[matched.instance[lines]]
    with_peer = Blocks.of(step, peer)
    place, size = with_peer.positions(), with_peer.size[with_peer.labels()]
    onward = 2 * place < size  # activations; the others are gradients, which pass the other way
    after = np.array([givers.get(other) == rank for other in peer.tolist()], dtype=np.bool_)
    return PipelineMessages(
        rank=np.full(len(lines), rank, dtype=np.int64),
        step=step,
        line=lines,
        start_ns=own.start_ns[matched.index[lines]],
        end_ns=own.end_ns[matched.index[lines]],
        peer=peer,
        sends=np.asarray(onward == after, dtype=np.bool_),
        bytes=np.full(len(lines), NONE, dtype=np.int64),
        peer_known=np.zeros(len(lines), dtype=np.bool_),
        directed=False,
    )


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
