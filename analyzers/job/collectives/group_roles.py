"""What each process group is for: by its recorded description, else by the collectives that run in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from perfscope.frozen import dataclass

_MEGATRON: Final = (
    # megatron/core/parallel_state.py, group_desc=...; the first match in the description counts.
    (r"EXPERT_TENSOR_AND_MODEL|EXPERT_MODEL_PARALLEL", "expert"),
    (r"EXPERT_TENSOR_PARALLEL", "tensor"),
    (r"EXPERT_DATA_PARALLEL", "data"),
    (r"TENSOR_AND|EXPERT_TENSOR_MODEL_PIPELINE|(?<!_)MODEL_PARALLEL_GROUP", "unknown"),
    (r"TENSOR_MODEL_PARALLEL", "tensor"),
    (r"PIPELINE_MODEL_PARALLEL|EMBEDDING_GROUP", "pipeline"),
    (r"DATA_PARALLEL", "data"),
    (r"CONTEXT_PARALLEL", "context"),
)
"""Groups of several dimensions at once (norms of gradients, amax of FP8) have no single role."""

_MESH: Final = "mesh_"
"""torch/distributed/device_mesh.py: ``mesh_`` and the name of the dimension."""

_DIMENSIONS: Final = {
    # Names that torchtitan, accelerate, NeMo and others give the dimensions of their meshes.
    **dict.fromkeys(("replicate", "replica"), "data"),
    **dict.fromkeys(("shard", "fsdp", "efsdp"), "shard"),
    **dict.fromkeys(("dp", "ddp", "edp", "data", "batch", "loss"), "data"),
    **dict.fromkeys(("pp", "pipe", "pipeline", "stage"), "pipeline"),
    **dict.fromkeys(("tp", "etp", "tensor"), "tensor"),
    **dict.fromkeys(("cp", "context", "sp", "seq", "sequence", "ulysses", "ring"), "context"),
    **dict.fromkeys(("ep", "expert", "experts"), "expert"),
}

_OF_A_GROUP: Final = ("", "group", "pg", "parallel", "process")
"""What scripts that describe a group themselves say beside the dimension (``new_group(group_desc="tp_group")``)."""

_MOST: Final = 0.5
"""Share of a group's time that a kind must take to decide the role."""

EARLY: Final = 0.15
"""Part of a step's compute in which there are no gradients yet, unless they are reduced after every micro-batch: the
forward alone is a third of forward and backward."""

_EARLY_SHARE: Final = 0.1
"""Share of the bytes of a group's all-reduces above which those early in the step are systematic."""

_IN_TURN: Final = 0.5
"""Share of the step's compute, and of the group's bytes, that takes turns with the other in tensor parallelism."""

_OF_TABLES: Final = 0.01
"""Least share of indices in what ranks with embedding tables exchange, where vectors have up to 200 values. Experts
exchange whole numbers too: how many tokens come, and a few for each token, which has thousands of bytes."""

_ALTERNATING: Final = 1 / 3
"""Share of neighbouring all-gathers and reduce-scatters that are one of each from which they take turns: with sequence
parallelism all in the forward and most in the backward. Where all gradients are reduced to their owners, and then all
parameters gathered, kinds change once or twice in a step."""

_OFTEN: Final = 8
"""Collectives in a step below which a group does not serve every layer."""


@dataclass(frozen=True, kw_only=True)
class GroupTraffic:
    """What ran in one group. Shares of kinds are of its transfer time."""

    share: Mapping[str, float]
    """Kind -> share."""
    per_step: float
    """Instances."""
    early_reduced: float | None
    """Share of the bytes of its all-reduces that are moved in the first part (``EARLY``) of a step's compute; None
    where nothing marks steps."""
    in_turn: float
    """How far its all-reduces and the step's compute take turns on the lowest rank present, 0..1: the share of compute
    between two all-reduces during which nothing is computed, or the share of the bytes of such, if less."""
    of_backward: float
    """Share of the bytes of its all-reduces that the backward issues, or the host after it; 0 where that is not seen.
    """
    replicas: bool
    """Its ranks are all of the job's, and run DistributedDataParallel."""
    gathers_first: float | None
    """All-gathers before the first reduce-scatter of a step, median; None without either."""
    alternating: float
    """Share of neighbours of one step among its all-gathers and reduce-scatters that are one of each."""
    uneven: bool
    """Its all-to-alls differ in size, as far as sizes are known."""
    indices: float
    """Share of the bytes of its all-to-alls that are whole numbers of 32 or 64 bits."""
    between: bool
    """All its exchanges are issued after the optimizer's step and before the next forward."""
    returned: bool
    """Most that is reduced to one rank is broadcast back before the optimizer's step."""
    rings: bool
    """All its exchanges are among all its ranks at once, more than two, or every rank sends before anything comes."""


def role_by_description(text: str) -> str | None:
    """The role that a recorded description states; None where it states none."""
    for pattern, role in _MEGATRON:
        if re.search(pattern, text):
            return role
    words = re.split(r"[^a-z]+", text.removeprefix(_MESH).lower())
    if not text.startswith(_MESH) and not all(word in _DIMENSIONS or word in _OF_A_GROUP for word in words):
        return None
    named = {_DIMENSIONS[word] for word in words if word in _DIMENSIONS}
    if "shard" in named:
        return "shard"  # dp_shard, dp_shard_cp: whatever else its ranks divide among them
    if "data" in named and named <= {"data", "context"}:
        return "data"  # gradients are reduced over both
    return named.pop() if len(named) == 1 else "unknown" if named else None


def role_by_traffic(traffic: GroupTraffic) -> tuple[str, str]:
    """(role, how it is known) by the kinds of collectives."""
    share = traffic.share

    def most(*kinds: str) -> bool:
        return sum(share.get(kind, 0.0) for kind in kinds) >= _MOST

    if most("send_recv"):
        if traffic.between:
            return "data", "parameters exchanged between the optimizer's step and the next forward"
        if traffic.rings:
            return "context", "exchanges in a ring of all its ranks"
        return "pipeline", "sends and recvs"
    if most("all_to_all"):
        return _swapping(traffic)
    if traffic.replicas and share.get("all_reduce") and most("all_reduce", "broadcast"):
        return "data", "DistributedDataParallel's all-reduces and broadcasts"
    if traffic.returned and most("reduce", "broadcast"):
        return "data", "gradients reduced to one rank, and broadcast back before the optimizer's step"
    if most("all_gather", "reduce_scatter", "reduce", "broadcast"):
        return _sharding(traffic, alone=most("all_gather", "reduce_scatter"))
    if most("all_reduce"):
        return _reducing(traffic)
    return "unknown", "no kind of collective prevails"


def _sharding(traffic: GroupTraffic, *, alone: bool) -> tuple[str, str]:
    """Of parameters, or of activations in each layer? ``alone``: nearly all are all-gathers and reduce-scatters."""
    if not alone or traffic.gathers_first is None:
        return "shard", "gradients reduced to their owners or parameters gathered from them"
    in_turn = traffic.gathers_first <= 2 and traffic.alternating >= _ALTERNATING
    if in_turn and traffic.per_step >= _OFTEN:
        return "tensor", "all-gathers and reduce-scatters in turn, all through the step"
    return "shard", "all-gathers and reduce-scatters"


def _swapping(traffic: GroupTraffic) -> tuple[str, str]:
    """Tokens of experts, or what else differs?"""
    if traffic.indices >= _OF_TABLES:
        return "unknown", "all-to-alls of indices and values, as of embedding tables"
    if traffic.uneven:
        return "expert", "all-to-alls of unequal sizes"
    return "unknown", "all-to-alls: of experts, of sequences or of embedding tables"


def _reducing(traffic: GroupTraffic) -> tuple[str, str]:
    """Gradients or activations? The next layer needs its activations: compute stops for them all through the step.

    Neither the time of day nor exposure decides: where communication takes most of a step, gradients are reduced early
    and without overlap too, but one after another.
    """
    if traffic.replicas:
        return "data", "all-reduces of DistributedDataParallel"
    if traffic.early_reduced is None:
        return "unknown", "all-reduces, but nothing marks steps"
    # A backward that waits for each reduction of gradients takes turns as well, but its forward reduces nothing.
    forward_waits = traffic.of_backward < 1 - _EARLY_SHARE
    if traffic.in_turn >= _IN_TURN and traffic.per_step >= _OFTEN and forward_waits:
        return "tensor", "compute and all-reduces in turn, all through the step"
    if traffic.early_reduced >= _EARLY_SHARE:
        return "unknown", "all-reduces before there are gradients, though compute does not wait for them"
    return "data", "all-reduces of gradients"
