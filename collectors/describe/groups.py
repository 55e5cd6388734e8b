"""The process groups and device meshes of this rank: gloo's events carry no group, and names of groups say what for."""

from __future__ import annotations

import sys
from typing import Any, Final

from perfscope.collectors.discovery import JobObjects
from perfscope.recording.metadata import ProcessGroupMetadata

MOST_MESHES: Final = 32
"""Meshes described; a job that takes its mesh apart anew each step has more of the same."""


def describe_groups() -> tuple[ProcessGroupMetadata, ...]:
    """The process groups that this rank is a member of, in the order of their making; empty without any."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return ()
    world = c10d._world
    return tuple(
        ProcessGroupMetadata(
            name=str(world.pg_names[group]),
            description=str(getattr(group, "group_desc", "")),
            backend=str(backend),
            ranks=tuple(int(rank) for rank in world.pg_group_ranks[group]),
        )
        for group, (backend, _) in world.pg_map.items()
    )


def describe_meshes(objects: JobObjects) -> dict[str, Any] | None:
    """Names, shape and groups of each different device mesh, most dimensions and named ones first; None without any."""
    meshes: dict[tuple[Any, ...], dict[str, Any]] = {}
    for mesh in objects.meshes:
        names, shape = mesh_dimensions(mesh)
        key = (names, shape)
        if key not in meshes:
            meshes[key] = {"names": list(names), "shape": list(shape), "groups": _group_names(mesh)}
    if not meshes:
        return None
    ordered = sorted(meshes.values(), key=lambda each: (-len(each["shape"]), not each["names"], each["names"]))
    return {"meshes": ordered[:MOST_MESHES]}


def mesh_dimensions(mesh: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names (empty where it has none) and sizes of a mesh's dimensions."""
    return tuple(mesh.mesh_dim_names or ()), tuple(int(size) for size in mesh.shape)


def _group_names(mesh: Any) -> list[str]:
    """Name of this rank's group along each dimension; empty for a mesh that has no groups or not this rank."""
    try:
        return [str(group.group_name) for group in mesh.get_all_groups()]
    except (AttributeError, RuntimeError, KeyError, ValueError):
        return []
