"""Which parallel strategies the job uses: as its wrappers and frameworks recorded, else as its collectives show.

Parallelism that is written out in collectives has no wrapper. What a group is for (``collectives.group_roles``) names
it, but one group may serve several: the ranks of context parallelism pass keys and values on, or gather them, and then
reduce gradients among themselves::

    all-reduces that compute waits for, all through the step      tensor
    messages in rings; all-gathers that the forward waits for,
    beside all-reduces of gradients                               context
    all-reduces of as many bytes as there are gradients,
    gradients reduced to one rank and broadcast back,
    messages between the optimizer's step and the next forward    data
    reduce-scatters of gradients, all-gathers of parameters       shard
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.collectives.group_roles import role_by_description
from perfscope.analyzers.job.collectives.of_layers import needed_by_layers
from perfscope.analyzers.job.collectives.of_loop import exchanges_between_steps
from perfscope.analyzers.job.collectives.returned import groups_of_returned
from perfscope.analyzers.job.collectives.table import group_size
from perfscope.analyzers.job.pipelines.messages import ring_groups
from perfscope.analyzers.job.tables.groups import in_turn, waits_of
from perfscope.recording.metadata import RunMetadata
from perfscope.results.tables import GroupRow, Pipeline
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Bool, Int64

_BESIDE: Final = frozenset({"ddp", "pipeline", "single"})
"""Recorded strategies beside which others may be written by hand: those that shard gather and reduce by themselves."""

_OF_MODELS: Final = frozenset({"context", "expert", "tensor"})
"""Roles of groups that divide a model or its input beside a wrapper that shards."""

_ROLES: Final = ("context", "data", "expert", "shard", "tensor")
"""Roles of groups that are names of strategies."""

_FSDP: Final = {1: "FullyShardedDataParallel.", 2: "FSDP::"}
"""Version -> what its ranges begin with."""

_GRADIENTS: Final = 0.25
"""Share of the gradients' bytes from which all-reduces are theirs: scalars of losses and norms are fewer, gradients may
be of half the size, and not all of them in one group.
"""

_GATHERS: Final = 2
"""All-gathers in a step from which layers may wait for them: keys and values of one."""

_LAYER: Final = 1024
"""Bytes of each rank from which gathered floats can be keys and values of a layer, and reduced ones gradients: losses,
lengths and metrics, of which trainers tell each other in every step, are fewer.
"""

_NO_FLOATS: Final = ("int", "uint", "bool")

_FORWARD: Final = 0.1
"""Share of the step's compute that takes turns with the all-gathers of a forward, which is a third of it."""


def job_strategies(
    result: AlignedJob,
    runs: Mapping[int, RunMetadata],
    pipeline: Pipeline | None,
    groups: tuple[GroupRow, ...],
    world_size: int | None,
) -> tuple[str, ...]:
    """Names of the strategies, sorted; empty where nothing tells. ``runs``: the metadata of ranks that wrote some."""
    strategies = {strategy for run in runs.values() for strategy in run.strategies}
    if not strategies:
        strategies = {strategy for partial in result.partials.values() for strategy in partial.strategies}
    if pipeline is not None:
        strategies |= {"pipeline"}
    if strategies <= _BESIDE and world_size != 1:
        shown = _shown(result, runs, groups)
        strategies |= shown - {"data", "shard"} if "ddp" in strategies else shown
    elif world_size != 1:
        strategies |= _described(result) & _OF_MODELS
    if not strategies and world_size == 1:
        strategies = {"single"}
    return tuple(sorted(strategies))


def fsdp_by_ranges(names: Iterable[str]) -> int | None:
    """The version of FSDP that writes these ranges; None where that is none, or both."""
    shown = {version for name in names for version, begins in _FSDP.items() if name.startswith(begins)}
    return shown.pop() if len(shown) == 1 else None


def _described(result: AlignedJob) -> set[str]:
    """Roles that the descriptions of used groups of several ranks state, as those of a mesh's dimensions do."""
    instances = result.matched.instances
    used = [number for number in distinct(instances.group).tolist() if group_size(instances, number) != 1]
    return {role_by_description(instances.groups[number].description) or "" for number in used}


def _shown(result: AlignedJob, runs: Mapping[int, RunMetadata], groups: tuple[GroupRow, ...]) -> set[str]:
    """What the groups' collectives show."""
    roles = {group.name: group.role for group in groups}
    shown = {role for role in roles.values() if role in _ROLES}
    matched = result.matched
    instances = matched.instances
    averaged = exchanges_between_steps(result.partials, matched)
    returned = groups_of_returned(result.partials, matched)
    rings = ring_groups(result) - averaged
    reduced = False
    for number in distinct(instances.group).tolist():
        if group_size(instances, number) == 1:
            continue
        lines = np.flatnonzero(instances.group[matched.instance] == number)
        described = role_by_description(instances.groups[number].description)
        role = roles.get(instances.groups[number].name)
        if described is not None or role in ("tensor", "unknown", "world"):
            reduced |= described == "data"
            continue
        reduced |= number in averaged or (role == "data" and number in returned)
        if number in rings:
            shown.add("context")
        if _reduces_gradients(result, runs, lines):
            reduced = True
            if _forward_waits(result, lines[_of_layers(result, lines)]):
                shown.add("context")
                shown -= {"shard"} if role == "shard" else set()
    return shown | {"data"} if reduced else shown - {"data"}


def _forward_waits(result: AlignedJob, lines: Int64) -> bool:
    """Does a forward take turns with these all-gathers?"""
    if len(lines) == 0:
        return False
    gathers = waits_of(result, lines, "all_gather")
    return len(gathers.step) >= _GATHERS * len(result.steps) and in_turn(gathers) >= _FORWARD


def _of_layers(result: AlignedJob, lines: Int64) -> Bool:
    """Which collectives move as much as a layer has keys and values, or an amount that is not recorded; those of batch
    normalizations do not.
    """
    instances = result.matched.instances
    which = result.matched.instance[lines]
    floats = np.array([not name.startswith(_NO_FLOATS) for name in instances.dtypes] or [True], dtype=np.bool_)
    moved, dtype = instances.bytes[which], instances.dtype[which]
    large = moved >= _LAYER * instances.participants[which]
    of_layers: Bool = (moved < 0) | (large & ((dtype == NONE) | floats[dtype]))
    # What a batch normalization gathers in its forward is no more, and may have no range of its own.
    needed = needed_by_layers(result.partials, result.matched)
    return of_layers & ~np.isin(instances.group[which], instances.group[needed & instances.is_kind(("all_reduce",))])


def _reduces_gradients(result: AlignedJob, runs: Mapping[int, RunMetadata], lines: Int64) -> bool:
    """Are the all-reduces of a group of as many bytes as gradients? Without metadata, any are of more than scalars:
    where gradients are sharded, those of their norm and of losses are of a few bytes.
    """
    sums = waits_of(result, lines, "all_reduce")
    if len(sums.step) == 0:
        return False
    rank = int(result.matched.rank[lines].min())
    model = runs[rank].model if rank in runs else None
    per_step = float(sums.bytes.sum()) / len(result.steps)
    if model is not None:
        return per_step >= _GRADIENTS * model.trainable_bytes
    which, instances = result.matched.instance[lines], result.matched.instances
    unsized = (instances.bytes < 0) & instances.is_kind(("all_reduce",))
    return per_step >= _LAYER or bool(unsized[which].any())
