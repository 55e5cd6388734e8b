"""Sends and receipts of all ranks paired up.

The k-th message that a rank sent to another in a step is the k-th that the other received from it. A kernel may carry
several messages, to and from several ranks; kernels that share a message, directly or through others, cannot end
without each other, and are one exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from perfscope.analyzers.blocks import Blocks
from perfscope.analyzers.collectives.mismatches import Mismatch
from perfscope.analyzers.collectives.participations import Participations
from perfscope.trace import NONE, Bool, Int64


@dataclass(frozen=True, eq=False)
class Pairs:
    """Messages of which both ends are in the recording: parallel arrays. Ends are participations."""

    sender: Int64
    receiver: Int64
    bytes: Int64
    mismatches: tuple[Mismatch, ...] = ()

    def __len__(self) -> int:
        return len(self.sender)

    def where(self, kept: Bool) -> Pairs:
        """Those for which ``kept`` holds."""
        return replace(self, sender=self.sender[kept], receiver=self.receiver[kept], bytes=self.bytes[kept])

    def and_(self, more: Pairs) -> Pairs:
        """These and then ``more``."""
        return Pairs(
            np.concatenate((self.sender, more.sender)),
            np.concatenate((self.receiver, more.receiver)),
            np.concatenate((self.bytes, more.bytes)),
            (*self.mismatches, *more.mismatches),
        )


def pair_messages(parts: Participations) -> Pairs:
    """Pair up the ends of messages by group, sender, receiver, step and order."""
    ends = parts.messages
    told = (ends.source != NONE) & (ends.destination != NONE)
    step = parts.step[ends.part]
    group = parts.group[ends.part]
    lanes = Blocks.of(~told, group, ends.source, ends.destination, step, ~ends.sent)
    position = lanes.positions()
    ways = Blocks.of(~told, group, ends.source, ends.destination, step, position)
    both = np.flatnonzero((ways.size == 2) & told[ways.order[ways.first]])
    # Of two ends with one key the sent one comes first only if its rank is lower: look which it is.
    one, other = ways.order[ways.first[both]], ways.order[ways.first[both] + 1]
    sent, received = np.where(ends.sent[one], one, other), np.where(ends.sent[one], other, one)
    fits = (ends.bytes[sent] == ends.bytes[received]) | (ends.bytes[sent] == NONE) | (ends.bytes[received] == NONE)
    mismatches = (*_unequal(parts, lanes, told), *_unlike(parts, sent[~fits], received[~fits]))
    sent, received = sent[fits], received[fits]
    return Pairs(ends.part[sent], ends.part[received], np.maximum(ends.bytes[sent], ends.bytes[received]), mismatches)


def _unequal(parts: Participations, lanes: Blocks, told: Bool) -> Iterator[Mismatch]:
    """More sent than received, or the other way round, where both ranks are in the recording."""
    ends = parts.messages
    recorded = np.array(list(parts.recorded), dtype=np.int64)
    first = lanes.order[lanes.first]
    known = told[first] & np.isin(ends.source[first], recorded) & np.isin(ends.destination[first], recorded)
    first, count = first[known], lanes.size[known]
    step, group = parts.step[ends.part[first]], parts.group[ends.part[first]]
    ways = Blocks.of(group, ends.source[first], ends.destination[first], step)
    sent = np.bincount(ways.labels(), weights=count * ends.sent[first], minlength=len(ways)).astype(np.int64)
    received = np.bincount(ways.labels(), weights=count * ~ends.sent[first], minlength=len(ways)).astype(np.int64)
    for way in np.flatnonzero(sent != received).tolist():
        end = first[ways.order[ways.first[way]]]
        source, destination = int(ends.source[end]), int(ends.destination[end])
        yield Mismatch(
            parts.groups[int(parts.group[ends.part[end]])].name,
            int(parts.step[ends.part[end]]),
            f"rank {source} sent {sent[way]} messages to rank {destination}, which received {received[way]}",
            (source, destination),
        )


def _unlike(parts: Participations, sent: Int64, received: Int64) -> Iterator[Mismatch]:
    """One sentence for each step and pair of ranks whose messages differ in size."""
    ends = parts.messages
    ways = Blocks.of(ends.source[sent], ends.destination[sent], parts.step[ends.part[sent]])
    for way in range(len(ways)):
        place = ways.order[ways.first[way]]
        out, back = sent[place], received[place]
        source, destination = int(ends.source[out]), int(ends.destination[out])
        more = f", and {ways.size[way] - 1} more" if ways.size[way] > 1 else ""
        yield Mismatch(
            parts.groups[int(parts.group[ends.part[out]])].name,
            int(parts.step[ends.part[out]]),
            f"rank {source} sent {ends.bytes[out]} bytes to rank {destination}, which received "
            f"{ends.bytes[back]}{more}",
            (source, destination),
        )


@dataclass(frozen=True, eq=False)
class Exchanges:
    """``number`` of the exchange of each of some participations, from 0; ``bound`` tells which pairs lie within one."""

    number: Int64
    bound: Bool


def exchanges(parts: Participations, rows: Int64, pairs: Pairs) -> Exchanges:
    """The exchanges that ``rows`` (participations that are point to point) and the ``pairs`` between them make up.

    A rank takes part in an exchange once: its kernels run one after another, so that none waits for a later one. Where
    a chain of messages comes back to a rank, some message in it lay in a buffer meanwhile: not the largest ones.
    """
    place = np.full(len(parts), NONE, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    sender, receiver = place[pairs.sender], place[pairs.receiver]
    label = _components(len(rows), sender, receiver)
    owners = Blocks.of(label, parts.rank[rows])
    twice = np.unique(label[owners.order[owners.first[owners.size > 1]]])
    bound = np.ones(len(pairs), dtype=np.bool_)
    if len(twice):
        doubtful = np.flatnonzero(np.isin(label[sender], twice))
        doubtful = doubtful[np.argsort(-pairs.bytes[doubtful], kind="stable")]
        bound[doubtful] = _without_return(parts.rank[rows], sender[doubtful], receiver[doubtful])
        label = _components(len(rows), sender[bound], receiver[bound])
    return Exchanges(np.unique(label, return_inverse=True)[1].astype(np.int64), bound)


def _components(size: int, one: Int64, other: Int64) -> Int64:
    """The lowest of the places that each of ``size`` places is connected with."""
    label = np.arange(size)
    while True:
        before = label.copy()
        low = np.minimum(label[one], label[other])
        np.minimum.at(label, one, low)
        np.minimum.at(label, other, low)
        label = label[label]
        if np.array_equal(label, before):
            return label


def _without_return(rank: Int64, one: Int64, other: Int64) -> Bool:
    """Which of the connections can stay, taken in their order, so that no rank is connected with itself."""
    chain_of: dict[int, set[int]] = {}
    stays = np.zeros(len(one), dtype=np.bool_)
    for index, (left, right) in enumerate(zip(one.tolist(), other.tolist(), strict=True)):
        chains = chain_of.setdefault(left, {left}), chain_of.setdefault(right, {right})
        if chains[0] is chains[1]:
            stays[index] = True
        elif {int(rank[place]) for place in chains[0]}.isdisjoint(int(rank[place]) for place in chains[1]):
            stays[index] = True
            chains[0].update(chains[1])
            for place in chains[1]:
                chain_of[place] = chains[0]
    return stays
