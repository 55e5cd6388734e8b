"""The messages that ranks of a pipeline pass on, side by side: activations one way, gradients the other.

Sends and receipts serve other ends too (attention over a ring of ranks). A group that its maker calls a pipeline's is
one; where none is called so, every group with messages that is neither called anything else nor exchanges in rings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfscope.analyzers.collectives.group_roles import role_by_description
from perfscope.analyzers.collectives.matched import Matched
from perfscope.analyzers.comparison import Comparison
from perfscope.trace import NONE, Bool, Int64


@dataclass(frozen=True, eq=False)
class PipelineMessages:
    """Messages of the used steps as each rank recorded its end of them: parallel arrays, by rank, step, start and order
    of issue.

    ``step`` is the job's step number; ``line`` the line of ``Comparison.matched``, several messages of which one kernel
    may carry; times are on the rank's own clock. ``peer`` is the rank at the other end, recorded or not (NONE: neither
    the recording nor the times of kernels tell).
    """

    rank: Int64
    step: Int64
    line: Int64
    start_ns: Int64
    end_ns: Int64
    peer: Int64
    sends: Bool
    bytes: Int64
    told: Bool

    def __len__(self) -> int:
        return len(self.rank)


def pipeline_messages(result: Comparison) -> PipelineMessages:
    """The messages of the used steps in groups that serve a pipeline."""
    matched = result.matched
    serves = _pipeline_groups(matched)
    columns = [_of_rank(result, rank, serves) for rank in sorted(result.partials)]
    return PipelineMessages(**{name: np.concatenate([each[name] for each in columns]) for name in columns[0]})


def _pipeline_groups(matched: Matched) -> Bool:
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


def _of_rank(result: Comparison, rank: int, serves: Bool) -> dict[str, NDArray[Any]]:
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
        "bytes": messages.bytes[kept], "told": ~silent | (alone & (peer != NONE)),
    }  # fmt: skip


def _inferred_peers(matched: Matched, rank: int, instance: Int64, sends: Bool) -> Int64:
    """The other ends of messages that do not name them: as matching paired them; where it paired their kernel by a
    message the other way only, still the one rank that shares the exchange.
    """
    passed = matched.passed
    peer = np.full(len(instance), NONE, dtype=np.int64)
    for way, here, there in ((True, passed.source, passed.destination), (False, passed.destination, passed.source)):
        mine = np.flatnonzero(here == rank)
        mine = mine[np.argsort(passed.instance[mine], kind="stable")]
        place = np.searchsorted(passed.instance[mine], instance)
        known = (place < len(mine)) & (sends == way)
        known[known] &= passed.instance[mine[place[known]]] == instance[known]
        peer[known] = there[mine[place[known]]]
    two = (peer == NONE) & (matched.instances.participants[instance] == 2)
    for index in np.flatnonzero(two).tolist():
        first, behind = np.searchsorted(matched.instance, [instance[index], instance[index] + 1])
        (peer[index],) = (other for other in matched.rank[first:behind].tolist() if other != rank)
    return peer


@dataclass(frozen=True, eq=False)
class Lane:
    """One rank's messages of one step, in order."""

    rank: int
    step: int
    rows: slice


def lanes(messages: PipelineMessages) -> Iterator[Lane]:
    """The messages of each rank and step."""
    if len(messages) == 0:
        return
    changes = (np.diff(messages.rank) != 0) | (np.diff(messages.step) != 0)
    edges = np.concatenate(([0], np.flatnonzero(changes) + 1, [len(messages)]))
    for first, behind in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        yield Lane(int(messages.rank[first]), int(messages.step[first]), slice(first, behind))
