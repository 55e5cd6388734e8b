"""How long each rank of a pipeline waits for other stages, and in which part of the step.

A bubble is exposed waiting in messages between stages, and in collectives across them (the norm of all gradients, tied
embeddings). Waiting within a stage, for data- or tensor-parallel peers, is none. Example, stage 1 of 2
with two micro-batches, in which everything takes 10 and sending costs nothing::

    wait 10 | F0 10 | B0 10 | F1 10 | B1 10 | wait 10 for the gradients' norm
    ^ start                                 ^ drain; waiting in between is steady
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.blocks import Blocks
from perfscope.analyzers.job.pipelines.messages import PipelineMessages, by_rank_and_step
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Bool, Int64


@dataclass(frozen=True, eq=False)
class Bubbles:
    """One rank's wait for other stages in each used step, ns: before its first micro-batch arrives, until its last
    gradient is computed, after that. ``bounded``: some neighbour is not in the recording, and the wait for it is an
    upper bound.
    """

    start_ns: Int64
    steady_ns: Int64
    drain_ns: Int64
    bounded: bool

    @property
    def total_ns(self) -> Int64:
        """All of it, by step."""
        return self.start_ns + self.steady_ns + self.drain_ns


def find_bubbles(result: AlignedJob, messages: PipelineMessages, stage_of: Mapping[int, int]) -> dict[int, Bubbles]:
    """The bubbles of every rank that has a stage."""
    across = _across_stages(result, messages, stage_of)
    shortest = _shortest_ns(result, messages)
    moving = _moving(result, messages)
    edges = _edges(result, messages)
    missing = any(rank not in result.partials for rank in stage_of)
    return {
        rank: _bubbles(
            result, rank, across, shortest, moving.get(rank, Intervals.empty()), edges[rank], missing=missing
        )
        for rank in sorted(result.partials)
        if rank in stage_of and rank in edges
    }


def _bubbles(
    result: AlignedJob, rank: int, across: Bool, shortest: Int64, moving: Intervals, edges: tuple[Int64, Int64],
    *, missing: bool,
) -> Bubbles:  # fmt: skip
    matched = result.matched
    lines = matched.lines_of(rank)
    lines = lines[across[lines]]
    start, arrival, end = (
        matched.clocks.to_own(rank, times[lines])
        for times in (matched.start_ns, matched.last_arrival_ns, matched.end_ns)
    )
    timeline = result.timelines[rank]
    waits = timeline.where(TimeCategory.COMM_WAIT).intersect(Intervals.of(start, arrival)).subtract(moving)
    # Where the peer is not recorded, at most all but the time of the quickest message of this size was wait.
    open_ = ~matched.instances.complete[matched.instance[lines]] & (shortest[lines] < end - start)
    if open_.any():
        exposed = timeline.where(TimeCategory.COMM_WAIT, TimeCategory.COMM_TRANSFER)
        until = end[open_] - shortest[lines[open_]]
        waits = waits.union(exposed.intersect(Intervals.of(start[open_], until)))
    begin, close = result.windows[rank]
    first, last = (np.clip(edge, begin, close) for edge in edges)
    last = np.maximum(first, last)
    return Bubbles(
        start_ns=waits.within(begin, first),
        steady_ns=waits.within(first, last),
        drain_ns=waits.within(last, close),
        bounded=missing and bool((~matched.instances.complete[matched.instance[lines]]).any()),
    )


def _across_stages(result: AlignedJob, messages: PipelineMessages, stage_of: Mapping[int, int]) -> Bool:
    """Which lines of ``matched`` are messages of the pipeline, or collectives among ranks of several stages."""
    matched = result.matched
    spans = [
        len({stage_of[rank] for rank in group.ranks if rank in stage_of}) > 1 for group in matched.instances.groups
    ]
    exchange = matched.instances.is_kind(("send_recv",))
    wide = np.array(spans or [False], dtype=np.bool_)[matched.instances.group] & ~exchange
    across = wide[matched.instance] if len(matched) else np.zeros(0, dtype=np.bool_)
    across[messages.line] = True
    return across


def _shortest_ns(result: AlignedJob, messages: PipelineMessages) -> Int64:
    """For each line of ``matched`` that carries messages, the shortest that any of the same size took."""
    matched = result.matched
    shortest = np.full(len(matched), np.iinfo(np.int64).max, dtype=np.int64)
    lines = distinct(messages.line)
    if len(lines):
        alike = Blocks.of(matched.instances.bytes[matched.instance[lines]])
        length = (matched.end_ns - matched.start_ns)[lines]
        shortest[lines] = np.minimum.reduceat(length[alike.order], alike.first)[alike.labels()]
    return shortest


def _moving(result: AlignedJob, messages: PipelineMessages) -> dict[int, Intervals]:
    """When a message was in transfer while its kernel waited for another message that it carries; own clocks.

    A message takes as long as the quickest of its size.
    """
    matched = result.matched
    several = np.bincount(messages.line, minlength=len(matched))[messages.line] > 1
    other = _other_lines(result, messages)
    met = np.flatnonzero(other != NONE)
    if not several[met].any():
        return {}
    arrival = np.maximum(matched.start_ns[messages.line[met]], matched.start_ns[other[met]])
    alike = Blocks.of(messages.bytes[met])
    took = matched.transfer_ns[messages.line[met]]
    quickest = np.minimum.reduceat(took[alike.order], alike.first)[alike.labels()]
    moving = {}
    for rank in distinct(messages.rank[met[several[met]]]).tolist():
        mine = several[met] & (messages.rank[met] == rank)
        begin = matched.clocks.to_own(rank, arrival[mine])
        moving[rank] = Intervals.of(begin, begin + quickest[mine])
    return moving


def _other_lines(result: AlignedJob, messages: PipelineMessages) -> Int64:
    """The line of ``matched`` at the other end of each message; NONE where it is not recorded."""
    matched = result.matched
    ranks = max(int(matched.rank.max(initial=0)), int(messages.peer.max(initial=0))) + 1
    keys = matched.instance * ranks + matched.rank  # lines are in the order of instance and rank
    wanted = matched.instance[messages.line] * ranks + messages.peer
    place = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
    return np.where((messages.peer != NONE) & (keys[place] == wanted), place, NONE) if len(keys) else messages.line


def _edges(result: AlignedJob, messages: PipelineMessages) -> dict[int, tuple[Int64, Int64]]:
    """For each rank, when its first forward of each used step could begin and its last backward had ended, own clock.

    Its first message brings it the first micro-batch, or is what the first forward put out; its last message brings it
    the last gradients, or is what the last backward put out. A step without messages is steady throughout.
    """
    place = {int(step): index for index, step in enumerate(result.steps)}
    edges: dict[int, tuple[Int64, Int64]] = {}
    for own in by_rank_and_step(messages):
        if own.rank not in edges:
            begin, close = result.windows[own.rank]
            edges[own.rank] = begin.copy(), close.copy()
        start, end, sends = messages.start_ns[own.rows], messages.end_ns[own.rows], messages.sends[own.rows]
        first, last = edges[own.rank]
        index = place[own.step]
        first[index] = start[0] if sends[0] else end[0]
        last[index] = max(int(np.where(sends, start, end).max()), int(first[index]))
    return edges
