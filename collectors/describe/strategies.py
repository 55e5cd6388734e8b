"""Which parallel strategies the job uses, and with which settings, spelled as the frameworks spell them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from perfscope.collectors.describe.groups import describe_meshes, mesh_dimensions
from perfscope.collectors.describe.sharding import describe_fsdp1, describe_fsdp2, parameter_groups
from perfscope.collectors.discovery import JobObjects, loaded
from perfscope.collectors.frameworks.frameworks import describe_frameworks
from perfscope.collectors.frameworks.torch import describe_pipeline
from perfscope.collectors.problems import Problems

Settings = dict[str, dict[str, Any]]
Described = tuple[str, dict[str, Any]] | None
"""A strategy and its settings; None where the job does not use it."""

_DDP_LOGGED: Final = (
    "gradient_as_bucket_view", "find_unused_parameters", "broadcast_buffers", "has_sync_bn", "num_buckets_reduced",
    "total_parameter_size_bytes", "unused_parameter_size", "comm_hook",
)  # fmt: skip
_DDP_FLAGS: Final = ("gradient_as_bucket_view", "find_unused_parameters", "broadcast_buffers", "has_sync_bn")
_MEBIBYTE: Final = 1 << 20


def describe_strategies(
    objects: JobObjects,
    optimizers: Iterable[Any],
    world_size: int,
    problems: Problems,
    observed: dict[str, Any] | None = None,
) -> tuple[tuple[str, ...], Settings]:
    """The strategies in use, and their settings by strategy; the device meshes under ``device_mesh``.

    ``observed``: what the frameworks' ranges saw of settings.
    """
    optimizers = list(optimizers)
    names: list[str] = []
    settings: Settings = {}
    for describe in (_ddp, describe_fsdp1, describe_fsdp2, describe_pipeline, _tensor):
        described = problems.guard(f"describing {describe.__name__.rpartition('_')[2]}", describe, objects)
        if described is not None:
            names.append(described[0])
            settings[described[0]] = {**described[1], **settings.get(described[0], {})}
    sharded = [each for each in optimizers if type(each).__name__ == "ZeroRedundancyOptimizer"]
    if sharded:
        names.append("zero1")
        settings["zero1"] = {
            "optimizer": "ZeroRedundancyOptimizer",
            "shards": str(getattr(vars(sharded[0]).get("_optim_constructor"), "__name__", "")),
            "parameters_as_bucket_view": bool(vars(sharded[0]).get("parameters_as_bucket_view")),
            "overlap_with_ddp": bool(vars(sharded[0]).get("_overlap_with_ddp")),
        }
    theirs, settings_of_theirs = describe_frameworks(objects, optimizers, observed or {}, problems)
    names.extend(theirs)
    settings = {**settings_of_theirs, **settings}
    if not names and world_size == 1:
        names.append("single")
    meshes = problems.guard("describing device meshes", describe_meshes, objects)
    if meshes is not None:
        settings["device_mesh"] = meshes
    return tuple(dict.fromkeys(names)), settings


def _ddp(objects: JobObjects) -> Described:
    modules = objects.of("DistributedDataParallel")
    if not modules:
        return None
    ddp = modules[0]
    settings: dict[str, Any] = {"bucket_cap_mb": ddp.bucket_bytes_cap / _MEBIBYTE}
    settings["static_graph"] = bool(ddp.static_graph)
    settings["group"] = str(getattr(ddp.process_group, "group_name", ""))
    logged = ddp._get_ddp_logging_data()
    for name in _DDP_LOGGED:
        if name in logged:
            settings[name] = bool(logged[name]) if name in _DDP_FLAGS else logged[name]
    sizes = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or ""
    settings["bucket_bytes"] = [int(size) for size in str(sizes).split(",") if size.strip().isdecimal()]
    if len(modules) > 1:
        settings["instances"] = len(modules)
    return "ddp", settings


def _tensor(objects: JobObjects) -> Described:
    """Parameters laid over the dimensions of a mesh that no sharding of whole replicas uses.

    ``fully_shard`` makes DTensors of its own: where it is at work, only the dimensions that its mesh lacks count.
    """
    kinds = loaded((("torch.distributed.tensor", "DTensor"), ("torch.distributed._tensor", "DTensor")))
    if not kinds:
        return None
    sharded = objects.of("FSDPModule")
    groups = (group for module in sharded for group in parameter_groups(module))
    taken = {name for group in groups for name in mesh_dimensions(group.mesh_info.mesh)[0]}
    placements: Counter[str] = Counter()
    degree, over = 1, ""
    for parameter in {id(each): each for root in objects.roots for each in root.parameters()}.values():
        if not isinstance(parameter, kinds):
            continue
        names, shape = mesh_dimensions(parameter.device_mesh)
        for dimension, placement in enumerate(parameter.placements):
            name = names[dimension] if names else ""
            if sharded and (not name or name in taken):
                continue
            placements[str(placement)] += 1
            if placement.is_shard():
                degree, over = max(degree, shape[dimension]), over or name
    if degree == 1:
        return None
    return "tensor", {"degree": degree, "mesh_dimension": over, "placements": dict(sorted(placements.items()))}
