"""Collectives that a training loop calls for itself, not for the model: metrics that are reduced, Python objects that
are gathered, barriers, flags.

They are small, and lie between the optimizer's step and the next forward on every rank. Objects are gathered in two:
their sizes, then their bytes. Parameters that are averaged there (local SGD, gossip) are no such thing: where larger
tensors go the same way, small ones may be biases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

import numpy as np

from perfscope.analyzers.job.collectives.matched import EXCHANGE, Instances, MatchedCollectives
from perfscope.analyzers.rank.collectives.collectives import SMALLEST
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.trace.trace import NONE, Bool

_OF_NUMBERS: Final = ("all_reduce", "all_gather", "reduce", "gather", "broadcast")
_OF_OBJECTS: Final = ("all_gather", "gather")
"""``broadcast_object_list`` is not among them: it may hand out what the next step needs."""
_BARRIER: Final = "barrier"


def collectives_of_loop(partials: Mapping[int, RankPartial], matched: MatchedCollectives) -> Bool:
    """Which instances are such collectives."""
    between = between_steps(partials, matched)
    known = matched.instances
    objects = between & _objects(known, between)
    small = between & known.is_kind(_OF_NUMBERS) & (known.bytes != NONE) & (known.bytes < SMALLEST)
    way = np.stack((known.group, known.kind), axis=1)
    larger = between & ~small & ~objects
    taken = {tuple(each) for each in way[larger].tolist()}
    alone = np.array([tuple(each) not in taken for each in way.tolist()], dtype=np.bool_)
    found: Bool = (small & alone) | objects | (between & known.is_kind((_BARRIER,)))
    return found


def calls_per_step(partials: Mapping[int, RankPartial], matched: MatchedCollectives, steps: int) -> dict[str, float]:
    """How many of them there are in a step, by kind, the most first; ``matched`` are those of so many steps."""
    known = matched.instances
    counts = Counter(known.kinds[kind] for kind in known.kind[collectives_of_loop(partials, matched)].tolist())
    return {kind: count / steps for kind, count in counts.most_common()}


def averaged_per_step(partials: Mapping[int, RankPartial], matched: MatchedCollectives, steps: int) -> float:
    """How many larger all-reduces the loop calls there in a step: of parameters, which local SGD averages."""
    known = matched.instances
    larger = known.is_kind(("all_reduce",)) & between_steps(partials, matched) & ~collectives_of_loop(partials, matched)
    return int((larger & ((known.bytes >= SMALLEST) | (known.bytes == NONE))).sum()) / steps


def between_steps(partials: Mapping[int, RankPartial], matched: MatchedCollectives) -> Bool:
    """Which instances every rank issues after the optimizer's step and before the next forward."""
    of_rank_op = np.zeros(len(matched), dtype=np.bool_)
    for rank, partial in partials.items():
        lines = matched.lines_of(rank)
        of_rank_op[lines] = partial.collectives.between[matched.index[lines]]
    found = np.ones(len(matched.instances), dtype=np.bool_)
    np.logical_and.at(found, matched.instance, of_rank_op)
    return found


def exchanges_between_steps(partials: Mapping[int, RankPartial], matched: MatchedCollectives) -> frozenset[int]:
    """Groups with messages all of which are sent and received between steps: neighbours exchange parameters."""
    exchanged = matched.instances.is_kind((EXCHANGE,))
    elsewhere = exchanged & ~between_steps(partials, matched)
    group = matched.instances.group
    return frozenset(group[exchanged].tolist()) - frozenset(group[elsewhere].tolist())


def _objects(known: Instances, between: Bool) -> Bool:
    """Bytes of Python objects: of uint8, right after their sizes in the same group."""
    sizes, content = (_is_type(known, name) for name in ("int64", "uint8"))
    found = np.zeros(len(known), dtype=np.bool_)
    last: dict[int, int] = {}
    for number in np.flatnonzero(between).tolist():
        group = int(known.group[number])
        before = last.get(group)
        found[number] = before is not None and bool(content[number] & sizes[before] & (known.bytes[before] < SMALLEST))
        last[group] = number
    return found & known.is_kind(_OF_OBJECTS)


def _is_type(known: Instances, name: str) -> Bool:
    number = known.dtypes.index(name) if name in known.dtypes else len(known.dtypes)
    found: Bool = known.dtype == number
    return found
