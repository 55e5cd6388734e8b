"""Collectives that a training loop calls for itself, not for the model: metrics that are reduced, Python objects that
are gathered, barriers, flags.

Between the optimizer's step and the next forward, and between two micro-batches, they are small. Objects are gathered
in two: their sizes, then their bytes. Parameters that are averaged there (local SGD, gossip) are no such thing, nor
gradients that are reduced after each micro-batch: where larger tensors go the same way, small ones may be biases.

Elsewhere the model may need what is small. In the forward and up to the backward, where frameworks log, only a few
numbers and barriers count: in groups of the ranks that reduce gradients in the backward, in which the forward sends
nothing else. Between the backward and the optimizer's step, where the norm of sharded gradients is reduced, they count
if each rank has the whole model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

import numpy as np

from perfscope.analyzers.job.collectives.matched import EXCHANGE, Instances, MatchedCollectives
from perfscope.analyzers.job.collectives.of_layers import needed_by_layers
from perfscope.analyzers.rank.collectives.collectives import SMALLEST
from perfscope.analyzers.rank.loop_phases import (
    BEFORE_BACKWARD,
    BEFORE_OPTIMIZER,
    BETWEEN_BATCHES,
    IN_FORWARD,
    STRETCHES,
)
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.trace.trace import NONE, Bool

_OF_NUMBERS: Final = ("all_reduce", "all_gather", "reduce", "gather", "broadcast")
_GATHERS: Final = ("all_gather", "gather")
"""Python objects are gathered, too. ``broadcast_object_list`` is none of these: it may hand out what the next step
needs."""
_BARRIER: Final = "barrier"
_FEW: Final = 128
"""Bytes of each rank that are a few numbers: features, statistics and codebooks of a model's are more."""

BETWEEN_STEPS: Final = "between optimizer and forward"
"""When most of them are issued; the others are ``STRETCHES``."""


def collectives_of_loop(partials: Mapping[int, RankPartial], matched: MatchedCollectives) -> Bool:
    """Which instances are such collectives."""
    found = np.zeros(len(matched.instances), dtype=np.bool_)
    for which in _by_place(partials, matched).values():
        found |= which
    return found


def calls_per_step(partials: Mapping[int, RankPartial], matched: MatchedCollectives, steps: int) -> dict[str, float]:
    """How many of them there are in a step, by kind, the most first; ``matched`` are those of so many steps."""
    known = matched.instances
    counts = Counter(known.kinds[kind] for kind in known.kind[collectives_of_loop(partials, matched)].tolist())
    return {kind: count / steps for kind, count in counts.most_common()}


def places_of_calls(partials: Mapping[int, RankPartial], matched: MatchedCollectives) -> tuple[str, ...]:
    """When they are issued: :data:`BETWEEN_STEPS` or names of ``STRETCHES``, where most are first."""
    counts = Counter({place: int(which.sum()) for place, which in _by_place(partials, matched).items()})
    return tuple(place for place, count in counts.most_common() if count)


def averaged_per_step(partials: Mapping[int, RankPartial], matched: MatchedCollectives, steps: int) -> float:
    """How many larger all-reduces the loop calls there in a step: of parameters, which local SGD averages."""
    known = matched.instances
    larger = known.is_kind(("all_reduce",)) & between_steps(partials, matched) & ~collectives_of_loop(partials, matched)
    return int((larger & ((known.bytes >= SMALLEST) | (known.bytes == NONE))).sum()) / steps


def between_steps(partials: Mapping[int, RankPartial], matched: MatchedCollectives) -> Bool:
    """Which instances every rank issues after the optimizer's step and before the next forward."""
    return _on_all_ranks(matched, {rank: partial.collectives.between for rank, partial in partials.items()})


def exchanges_between_steps(partials: Mapping[int, RankPartial], matched: MatchedCollectives) -> frozenset[int]:
    """Groups with messages all of which are sent and received between steps: neighbours exchange parameters."""
    exchanged = matched.instances.is_kind((EXCHANGE,))
    elsewhere = exchanged & ~between_steps(partials, matched)
    group = matched.instances.group
    return frozenset(group[exchanged].tolist()) - frozenset(group[elsewhere].tolist())


def by_stretch(partials: Mapping[int, RankPartial], matched: MatchedCollectives) -> dict[str, Bool]:
    """Which instances every rank issues in each of ``STRETCHES``, by its name."""
    of_rank_op = np.full(len(matched), NONE, dtype=np.int64)
    for rank, partial in partials.items():
        lines = matched.lines_of(rank)
        of_rank_op[lines] = partial.collectives.stretch[matched.index[lines]]
    lowest = np.full(len(matched.instances), len(STRETCHES), dtype=np.int64)
    highest = np.full(len(matched.instances), NONE, dtype=np.int64)
    np.minimum.at(lowest, matched.instance, of_rank_op)
    np.maximum.at(highest, matched.instance, of_rank_op)
    return {name: (lowest == place) & (highest == place) for place, name in enumerate(STRETCHES)}


def _on_all_ranks(matched: MatchedCollectives, of_rank: Mapping[int, Bool]) -> Bool:
    """Which instances are so on every rank, by what is so of each rank's ``Collectives``."""
    of_rank_op = np.zeros(len(matched), dtype=np.bool_)
    for rank, is_so in of_rank.items():
        lines = matched.lines_of(rank)
        of_rank_op[lines] = is_so[matched.index[lines]]
    found = np.ones(len(matched.instances), dtype=np.bool_)
    np.logical_and.at(found, matched.instance, of_rank_op)
    return found


def _by_place(partials: Mapping[int, RankPartial], matched: MatchedCollectives) -> dict[str, Bool]:
    """Which instances are such collectives, by when every rank issues them."""
    known = matched.instances
    between = between_steps(partials, matched)
    stretches = by_stretch(partials, matched)
    found = {BETWEEN_STEPS: _small(known, between), BETWEEN_BATCHES: _small(known, stretches[BETWEEN_BATCHES])}
    in_forward = stretches[IN_FORWARD] | stretches[BEFORE_BACKWARD]
    few = _few_numbers(partials, matched, in_forward)
    found |= {name: few & stretches[name] for name in (IN_FORWARD, BEFORE_BACKWARD)}
    after = few & stretches[BEFORE_OPTIMIZER]
    others = ~(found[BETWEEN_STEPS] | found[BETWEEN_BATCHES] | (few & in_forward) | after)
    whole = _gradients(partials, matched) & known.is_kind(("all_reduce",))
    whole |= known.is_kind(("broadcast",)) & stretches[IN_FORWARD]
    return found | {BEFORE_OPTIMIZER: after & bool(whole[others].all())}


def _small(known: Instances, here: Bool) -> Bool:
    """Of the instances ``here``, where the model needs none that are small."""
    objects = here & _objects(known, here)
    small = here & known.is_kind(_OF_NUMBERS) & (known.bytes != NONE) & (known.bytes < SMALLEST)
    way = np.stack((known.group, known.kind), axis=1)
    larger = here & ~small & ~objects
    taken = {tuple(each) for each in way[larger].tolist()}
    alone = np.array([tuple(each) not in taken for each in way.tolist()], dtype=np.bool_)
    found: Bool = (small & alone) | objects | (here & known.is_kind((_BARRIER,)))
    return found


def _few_numbers(partials: Mapping[int, RankPartial], matched: MatchedCollectives, in_forward: Bool) -> Bool:
    """Metrics of a few numbers and barriers in groups of all ranks that reduce gradients of the same parameters in the
    backward, in which the model sends nothing ``in_forward``: no activations, features or codebooks, no tokens of
    experts. What may be buffers, parameters or statistics of a batch normalization is neither of the two.
    """
    known, gradients = matched.instances, _gradients(partials, matched)
    needed = needed_by_layers(partials, matched)
    gathering = np.isin(known.group, known.group[needed | (gradients & known.is_kind(("reduce_scatter",)))])
    gathers = known.is_kind(_GATHERS)
    size = np.where(gathers, _FEW * known.participants, _FEW)
    few = known.is_kind(("all_reduce", "reduce", *_GATHERS)) & (known.bytes != NONE) & (known.bytes <= size)
    few = (few | known.is_kind((_BARRIER,))) & ~(gathering & gathers) & ~needed
    of_wrapper = needed | known.is_kind(("broadcast",)) | (gathering & gathers)
    models = known.group[in_forward & ~few & ~of_wrapper]
    found: Bool = few & np.isin(known.group, list(_of_data(known, gradients))) & ~np.isin(known.group, models)
    return found


def _of_data(known: Instances, gradients: Bool) -> set[int]:
    """Groups that reduce gradients, and those with all ranks of such a group."""
    reduced = set(known.group[gradients].tolist())
    ranks = [set(known.groups[number].ranks) for number in reduced]
    return reduced | {
        number
        for number in set(known.group.tolist())
        if any(own and own <= set(known.groups[number].ranks) for own in ranks)
    }


def _gradients(partials: Mapping[int, RankPartial], matched: MatchedCollectives) -> Bool:
    """Which instances reduce gradients of parameters in the backward."""
    known = matched.instances
    backward = _on_all_ranks(matched, {rank: partial.collectives.backward for rank, partial in partials.items()})
    found: Bool = backward & known.is_kind(("all_reduce", "reduce_scatter")) & ~needed_by_layers(partials, matched)
    return found


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
    return found & known.is_kind(_GATHERS)


def _is_type(known: Instances, name: str) -> Bool:
    number = known.dtypes.index(name) if name in known.dtypes else len(known.dtypes)
    found: Bool = known.dtype == number
    return found
