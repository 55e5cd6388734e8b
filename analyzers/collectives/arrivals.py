"""Participations that belong together, as matched collectives: who came when, and who waited for whom."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfscope.analyzers.collectives.matched import Instances, Matched, Passed
from perfscope.analyzers.collectives.participations import Participations
from perfscope.analyzers.collectives.point_to_point import Pairs
from perfscope.clock import Clocks
from perfscope.trace import NONE, Bool, Int64

EXCHANGE = "send_recv"
"""Kind of an instance that is made of messages, whatever its ends are called."""


@dataclass(frozen=True, eq=False)
class Together:
    """``instance`` of each participation; NONE for those left over.

    ``pairs`` are the messages inside instances, ``is_exchange`` tells the participations that are made of messages,
    ``open_`` those of them of which some other end is missing, ``inferred`` those whose other ends were found by time.
    """

    instance: Int64
    pairs: Pairs
    is_exchange: Bool
    open_: Bool
    inferred: Bool


def arrivals(parts: Participations, together: Together, clocks: Clocks) -> Matched:
    """Put the instances in the order of their last arrivals, and say who waited for whom."""
    start = clocks.to_common(parts.rank, parts.start_ns)
    end = clocks.to_common(parts.rank, parts.end_ns)
    kept = np.flatnonzero(together.instance != NONE)
    numbers, label = np.unique(together.instance[kept], return_inverse=True)
    label = label.astype(np.int64)
    count = len(numbers)
    latest = _most(label, start[kept], count)
    position = np.empty(count, dtype=np.int64)
    position[np.argsort(latest, kind="stable")] = np.arange(count)  # causes are settled before what they caused
    label = position[label]
    instances = _instances(parts, together, kept, label, start, count)
    arrival, waited_for = _last_arrivals(start[kept], end[kept], label, instances)
    partner_arrival, partner = _partners(parts, together, start, end)
    exchange = together.is_exchange[kept]
    arrival = np.where(exchange, partner_arrival[kept], arrival)
    waited_for = np.where(exchange, np.where(together.open_[kept], NONE, partner[kept]), waited_for)
    arrival = np.clip(arrival, start[kept], end[kept])
    done = np.maximum(_done(parts, together, end)[kept], arrival)
    lines = np.lexsort((parts.rank[kept], label))
    rows = kept[lines]
    return Matched(
        label[lines], parts.rank[rows], parts.index[rows], start[rows], end[rows], arrival[lines], waited_for[lines],
        done[lines], instances, _passed(parts, together, kept, label), clocks,
    )  # fmt: skip


def _instances(
    parts: Participations, together: Together, kept: Int64, label: Int64, start: Int64, count: int
) -> Instances:
    group = _first(label, parts.group[kept], count)
    present = np.bincount(label, minlength=count).astype(np.int64)
    exchange = _most(label, together.is_exchange[kept].astype(np.int64), count) > 0
    open_ = _most(label, together.open_[kept].astype(np.int64), count) > 0
    complete = np.where(exchange, ~open_, present == parts.expected[group] if count else False)
    order = np.lexsort((-parts.rank[kept], start[kept], label))
    last = np.full(count, NONE, dtype=np.int64)
    last[label[order]] = parts.rank[kept][order]
    kinds, kind = _kinds(parts, kept, label, exchange, count)
    return Instances(
        group=group,
        kind=kind,
        dtype=_most(label, parts.dtype[kept], count),
        bytes=_most(label, parts.bytes[kept], count),
        step=_first(label, parts.step[kept], count),
        participants=present,
        complete=complete,
        last_rank=np.where(complete & (present > 1), last, NONE),
        last_arrival_ns=_most(label, start[kept], count),
        inferred=_most(label, together.inferred[kept].astype(np.int64), count) > 0,
        groups=parts.groups,
        kinds=kinds,
        dtypes=parts.dtypes,
    )


def _kinds(
    parts: Participations, kept: Int64, label: Int64, exchange: Bool, count: int
) -> tuple[tuple[str, ...], Int64]:
    """Kinds of the instances: of an exchange always the same, else the first that any participant knows."""
    kinds = parts.kinds if EXCHANGE in parts.kinds else (*parts.kinds, EXCHANGE)
    unknown = kinds.index("unknown") if "unknown" in kinds else NONE
    told = parts.kind[kept]
    least = np.full(count, len(kinds), dtype=np.int64)
    np.minimum.at(least, label, np.where(told == unknown, len(kinds), told))
    return kinds, np.where(exchange, kinds.index(EXCHANGE), np.where(least == len(kinds), unknown, least))


def _last_arrivals(start: Int64, end: Int64, label: Int64, instances: Instances) -> tuple[Int64, Int64]:
    """(last arrival, who it was) for each participation in a collective of a whole group."""
    shortest = -_most(label, start - end, len(instances))
    arrival = np.where(instances.complete[label], instances.last_arrival_ns[label], end - shortest[label])
    return arrival, instances.last_rank[label]


def _partners(parts: Participations, together: Together, start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """(last arrival, who it was) for each participation, among itself and the other ends of its messages.

    A sender that ended before its receiver began did not wait for it, nor the receiver for what lay in its buffer.
    """
    sender, receiver = together.pairs.sender, together.pairs.receiver
    met = end[sender] > start[receiver]
    one = np.concatenate((sender[met], receiver[met]))
    other = np.concatenate((receiver[met], sender[met]))
    arrival: Int64 = start.copy()
    np.maximum.at(arrival, one, start[other])
    partner = parts.rank.copy()
    last = (start[other] == arrival[one]) & (start[other] > start[one])
    partner[one[last]] = parts.rank[other[last]]
    return arrival, partner


def _done(parts: Participations, together: Together, end: Int64) -> Int64:
    """When nothing of each participation's transfer is left."""
    done: Int64 = end.copy()
    sender, receiver = together.pairs.sender, together.pairs.receiver
    on_host = parts.on_host[sender]
    sender, receiver = sender[on_host], receiver[on_host]
    received = np.full(len(end), np.iinfo(np.int64).min, dtype=np.int64)
    np.maximum.at(received, sender, end[receiver])
    received[receiver] = np.iinfo(np.int64).max  # one that receives besides ends when it has
    done[sender] = np.minimum(end[sender], received[sender])
    return done


def _passed(parts: Participations, together: Together, kept: Int64, label: Int64) -> Passed:
    """Every message once: by its pair, or by its only end."""
    instance = np.full(len(parts), NONE, dtype=np.int64)
    instance[kept] = label
    pairs, ends = together.pairs, parts.messages
    told = (ends.source != NONE) & (ends.destination != NONE)
    recorded = np.isin(np.where(ends.sent, ends.destination, ends.source), list(parts.recorded))
    lone = told & ~recorded
    return Passed(
        instance=np.concatenate((instance[pairs.sender], instance[ends.part[lone]])),
        source=np.concatenate((parts.rank[pairs.sender], ends.source[lone])),
        destination=np.concatenate((parts.rank[pairs.receiver], ends.destination[lone])),
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
