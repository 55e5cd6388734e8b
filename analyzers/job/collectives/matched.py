"""Matched collectives: the same one on every rank, with arrivals, waits and transfers.

Arrival of a rank is the start of its kernel, aligned. Wait = last arrival - own arrival; transfer = end - last arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final

import numpy as np

from perfscope.analyzers.job.blocks import where
from perfscope.analyzers.job.collectives.unmatched import MessagePairs, UnmatchedOps
from perfscope.analyzers.rank.collectives.collectives import Group
from perfscope.frozen import dataclass
from perfscope.trace.clock import Clocks
from perfscope.trace.trace import NONE, Bool, Int64

_AT_ONCE: Final = 0.05
_RETURNS_NS: Final = 100_000
"""A wait returns at once: within this share of the time since its message was issued, or so soon."""

_ROUNDED_NS: Final = 1_000
"""Ends that are no farther apart are one: traces round starts and durations."""

EXCHANGE: Final = "send_recv"
"""Kind of an instance that is made of messages, whatever its ends are called."""


@dataclass(frozen=True, eq=False)
class MatchedCollectives:
    """The rank ops of matched collectives, ordered by instance, then rank: parallel arrays of one length.

    ``index`` is the row in that rank's ``Collectives``. Times are aligned ns. ``last_arrival_ns`` is the last arrival
    that the rank op had to wait for, never outside its own ``[start_ns, end_ns]``: the instance's, or of an
    exchange of messages that of the ranks at their other ends. ``waited_for`` is the rank that arrived then (itself
    where it came last, NONE where not known), ``done_ns`` when the transfer is complete: the end, except for a host's
    messages: its range around a send ends when the program waits for it, that around one of several recvs may.
    Instances are described by ``instances``.
    """

    instance: Int64
    rank: Int64
    index: Int64
    start_ns: Int64
    end_ns: Int64
    last_arrival_ns: Int64
    waited_for: Int64
    done_ns: Int64
    instances: Instances
    messages: MatchedMessages
    clocks: Clocks

    def __len__(self) -> int:
        return len(self.instance)

    def of_steps(self, steps: Int64) -> MatchedCollectives:
        """The part that belongs to ``steps``; instances keep their order and are numbered anew."""
        kept = np.isin(self.instances.step, steps)
        number = np.cumsum(kept) - 1
        lines, messages = where(self, kept[self.instance]), where(self.messages, kept[self.messages.instance])
        return replace(
            lines,
            instance=number[lines.instance],
            instances=where(self.instances, kept),
            messages=replace(messages, instance=number[messages.instance]),
        )

    def lines_of(self, rank: int) -> Int64:
        """Lines of one rank, ascending."""
        order, ranks = self._by_rank
        begin, end = np.searchsorted(ranks, [rank, rank + 1])
        return order[begin:end]

    @cached_property
    def _by_rank(self) -> tuple[Int64, Int64]:
        order = np.argsort(self.rank, kind="stable")
        return order, self.rank[order]

    @property
    def wait_ns(self) -> Int64:
        """How long each participant waited for the last arrival."""
        return self.last_arrival_ns - self.start_ns

    @property
    def transfer_ns(self) -> Int64:
        """From the last arrival until the transfer is complete, for each participant."""
        return self.done_ns - self.last_arrival_ns


@dataclass(frozen=True, eq=False)
class Instances:
    """One line for each matched collective, in order of its last arrival. ``groups`` and ``kinds`` are indexed.

    ``complete``: every participant is in the recording, so that the last arrival is known; otherwise it is bounded by
    the shortest duration present (the last arriver's own duration is the transfer, and it is at most that long).
    ``last_rank`` is the last arriver, NONE where it is not known. A message, or several that one kernel of some rank
    carries matching, is an instance of kind ``send_recv`` among the ranks at their ends; ``inferred`` where these were
    found by the kernels' times.
    """

    group: Int64
    kind: Int64
    dtype: Int64
    bytes: Int64
    step: Int64
    """The job's step number; NONE outside all steps."""
    participants: Int64
    complete: Bool
    last_rank: Int64
    last_arrival_ns: Int64
    inferred: Bool
    groups: tuple[Group, ...]
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.group)

    def is_kind(self, kinds: Sequence[str]) -> Bool:
        """Which are of these kinds."""
        return np.array([kind in kinds for kind in self.kinds] or [False], dtype=np.bool_)[self.kind]


@dataclass(frozen=True, eq=False)
class MatchedMessages:
    """The messages in exchanges: parallel arrays. ``source`` and ``destination`` are global ranks, either of which may
    be missing from the recording; ``bytes`` NONE where not recorded.
    """

    instance: Int64
    source: Int64
    destination: Int64
    bytes: Int64

    def __len__(self) -> int:
        return len(self.instance)


@dataclass(frozen=True, eq=False)
class Matching:
    """``instance`` of each rank op; NONE for those that do not match.

    ``pairs`` are the messages inside instances. ``is_exchange``: the rank op carries messages; ``open_``: the other end
    of some of them is missing; ``inferred``: the other participants were found by time.
    """

    instance: Int64
    pairs: MessagePairs
    is_exchange: Bool
    open_: Bool
    inferred: Bool


def arrivals(ops: UnmatchedOps, matching: Matching, clocks: Clocks) -> MatchedCollectives:
    """Put the instances in the order of their last arrivals, and find which rank waited for which."""
    start = clocks.to_common(ops.rank, ops.start_ns)
    end = clocks.to_common(ops.rank, ops.end_ns)
    kept = np.flatnonzero(matching.instance != NONE)
    numbers, label = np.unique(matching.instance[kept], return_inverse=True)
    label = label.astype(np.int64)
    count = len(numbers)
    latest = _most(label, start[kept], count)
    position = np.empty(count, dtype=np.int64)
    position[np.argsort(latest, kind="stable")] = np.arange(count)  # causes are settled before what they caused
    label = position[label]
    instances = _instances(ops, matching, kept, label, start, count)
    shortest = -_most(label, start[kept] - end[kept], count)
    arrival = np.where(instances.complete[label], instances.last_arrival_ns[label], end[kept] - shortest[label])
    partner_arrival, partner = _partners(ops, matching, start, end)
    exchange = matching.is_exchange[kept]
    arrival = np.where(exchange, partner_arrival[kept], arrival)
    waited_for = np.where(exchange, np.where(matching.open_[kept], NONE, partner[kept]), instances.last_rank[label])
    arrival = np.clip(arrival, start[kept], end[kept])
    done = np.maximum(_done(ops, matching, end)[kept], arrival)
    done = np.minimum(done, _waited_for_before(ops, kept, arrival, done, end))
    lines = np.lexsort((ops.rank[kept], label))
    rows = kept[lines]
    return MatchedCollectives(
        label[lines], ops.rank[rows], ops.index[rows], start[rows], end[rows], arrival[lines], waited_for[lines],
        done[lines], instances, _messages(ops, matching, kept, label), clocks,
    )  # fmt: skip


def _instances(ops: UnmatchedOps, matching: Matching, kept: Int64, label: Int64, start: Int64, count: int) -> Instances:
    group = _first(label, ops.group[kept], count)
    present = np.bincount(label, minlength=count).astype(np.int64)
    exchange = _most(label, matching.is_exchange[kept].astype(np.int64), count) > 0
    open_ = _most(label, matching.open_[kept].astype(np.int64), count) > 0
    complete = np.where(exchange, ~open_, present == ops.expected[group] if count else False)
    order = np.lexsort((-ops.rank[kept], start[kept], label))
    last = np.full(count, NONE, dtype=np.int64)
    last[label[order]] = ops.rank[kept][order]
    kinds, kind = _kinds(ops, kept, label, exchange, count)
    return Instances(
        group=group,
        kind=kind,
        dtype=_most(label, ops.dtype[kept], count),
        bytes=_most(label, ops.bytes[kept], count),
        step=_first(label, ops.step[kept], count),
        participants=present,
        complete=complete,
        last_rank=np.where(complete & (present > 1), last, NONE),
        last_arrival_ns=_most(label, start[kept], count),
        inferred=_most(label, matching.inferred[kept].astype(np.int64), count) > 0,
        groups=ops.groups,
        kinds=kinds,
        dtypes=ops.dtypes,
    )


def _kinds(ops: UnmatchedOps, kept: Int64, label: Int64, exchange: Bool, count: int) -> tuple[tuple[str, ...], Int64]:
    """Kinds of the instances: of an exchange always the same, else the first that any participant has recorded."""
    kinds = ops.kinds if EXCHANGE in ops.kinds else (*ops.kinds, EXCHANGE)
    unknown = kinds.index("unknown") if "unknown" in kinds else NONE
    recorded = ops.kind[kept]
    least = np.full(count, len(kinds), dtype=np.int64)
    np.minimum.at(least, label, np.where(recorded == unknown, len(kinds), recorded))
    return kinds, np.where(exchange, kinds.index(EXCHANGE), np.where(least == len(kinds), unknown, least))


def _partners(ops: UnmatchedOps, matching: Matching, start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """(last arrival, its rank) for each rank op, among itself and the other ends of its messages.

    A send that ended before its recv began did not wait for it, nor the recv for a message that was in its buffer.
    """
    sender, receiver = matching.pairs.sender, matching.pairs.receiver
    met = end[sender] > start[receiver]
    one = np.concatenate((sender[met], receiver[met]))
    other = np.concatenate((receiver[met], sender[met]))
    arrival: Int64 = start.copy()
    np.maximum.at(arrival, one, start[other])
    partner = ops.rank.copy()
    last = (start[other] == arrival[one]) & (start[other] > start[one])
    partner[one[last]] = ops.rank[other[last]]
    return arrival, partner


def _done(ops: UnmatchedOps, matching: Matching, end: Int64) -> Int64:
    """When the transfer of each rank op is complete."""
    done: Int64 = end.copy()
    sender, receiver = matching.pairs.sender, matching.pairs.receiver
    on_host = ops.on_host[sender]
    sender, receiver = sender[on_host], receiver[on_host]
    received = np.full(len(end), np.iinfo(np.int64).min, dtype=np.int64)
    np.maximum.at(received, sender, end[receiver])
    received[receiver] = np.iinfo(np.int64).max  # an op that also receives ends with its recv
    done[sender] = np.where(end[sender] - received[sender] > _ROUNDED_NS, received[sender], end[sender])
    return done


def _waited_for_before(ops: UnmatchedOps, kept: Int64, arrival: Int64, done: Int64, end: Int64) -> Int64:
    """``end`` of each rank op ``kept``, but of a host's messages that were there before the program waited for them:
    when is not recorded.

    A program waits for its messages one after another. One whose wait returns at once, behind that for an earlier
    other, arrived while it waited for that; it is taken to have been sent in no more time than that one::

        send to a late rank    [0           26 .. 32)      26: its recv is posted
        recv of an early one    [1   11 ............ 32.1)  11: it is sent; not 21 but at most 6 of transfer
    """
    rows = np.flatnonzero(ops.on_host[kept] & ops.one_way[kept])
    if len(rows) < 2:  # a pair
        return end[kept]
    rank, start, ends = ops.rank[kept][rows], ops.start_ns[kept][rows], ops.end_ns[kept][rows]
    order = np.lexsort((ends, rank))
    first, second = order[:-1], order[1:]
    at_once = (rank[first] == rank[second]) & (start[second] < ends[first])
    at_once &= ends[second] - ends[first] <= np.maximum(_AT_ONCE * (ends[second] - start[second]), _RETURNS_NS)
    first, second = rows[first[at_once]], rows[second[at_once]]
    result: Int64 = end[kept]
    result[second] = np.minimum(done[second], arrival[second] + (done - arrival)[first])
    return result


def _messages(ops: UnmatchedOps, matching: Matching, kept: Int64, label: Int64) -> MatchedMessages:
    """Every message once: by its pair, or by its only recorded end."""
    instance = np.full(len(ops), NONE, dtype=np.int64)
    instance[kept] = label
    pairs, ends = matching.pairs, ops.messages
    named = (ends.source != NONE) & (ends.destination != NONE)
    recorded = np.isin(np.where(ends.sent, ends.destination, ends.source), list(ops.recorded))
    lone = named & ~recorded
    return MatchedMessages(
        instance=np.concatenate((instance[pairs.sender], instance[ends.op[lone]])),
        source=np.concatenate((ops.rank[pairs.sender], ends.source[lone])),
        destination=np.concatenate((ops.rank[pairs.receiver], ends.destination[lone])),
        bytes=np.concatenate((pairs.bytes, ends.bytes[lone])),
    )


def _first(label: Int64, value: Int64, count: int) -> Int64:
    result = np.full(count, NONE, dtype=np.int64)
    result[label[::-1]] = value[::-1]
    return result


def _most(label: Int64, value: Int64, count: int) -> Int64:
    result = np.full(count, np.iinfo(np.int64).min, dtype=np.int64)
    np.maximum.at(result, label, value)
    return result
