"""Settings of torch's own sharding of parameters: FSDP1's wrapper and FSDP2's ``fully_shard``."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from perfscope.collectors.describe.groups import mesh_dimensions
from perfscope.collectors.discovery import JobObjects

_FSDP1: Final = ("sharding_strategy", "backward_prefetch", "forward_prefetch", "limit_all_gathers", "cpu_offload")
_DTYPES: Final = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")


def describe_fsdp1(objects: JobObjects) -> tuple[str, dict[str, Any]] | None:
    """``FullyShardedDataParallel`` and its settings; None where the job does not use it."""
    modules = objects.of("FullyShardedDataParallel")
    if not modules:
        return None
    root = modules[0]
    settings: dict[str, Any] = {"version": 1, "units": len(modules)}
    for name in _FSDP1:
        value = vars(root).get(name)
        if value is not None:
            settings[name] = _plain(value)
    settings["use_orig_params"] = bool(vars(root).get("_use_orig_params"))
    settings["mixed_precision"] = _precision(vars(root).get("mixed_precision"))
    settings["shard_degree"] = int(root.process_group.size())
    settings["group"] = str(getattr(root.process_group, "group_name", ""))
    replicas = vars(root).get("_inter_node_pg")
    if replicas is not None:
        settings["replicate_degree"] = int(replicas.size())
        settings["replicate_group"] = str(getattr(replicas, "group_name", ""))
    return "fsdp", settings


def describe_fsdp2(objects: JobObjects) -> tuple[str, dict[str, Any]] | None:
    """``fully_shard`` and its settings; DDP's name for ``replicate``, which shares its machinery. None without either.

    Settings are those of the first unit, ``reshard_after_forward`` that of most units.
    """
    modules = objects.of("FSDPModule")
    if not modules:
        return None
    groups = [group for module in modules for group in parameter_groups(module)]
    settings: dict[str, Any] = {"version": 2, "units": len(modules)}
    if not groups:  # nothing has been set up before the first forward
        return "fsdp", settings
    first = groups[0]
    info = first.mesh_info
    names, shape = mesh_dimensions(info.mesh)
    settings["mesh"] = {"names": list(names), "shape": list(shape)}
    for kind in ("shard", "replicate"):
        size, group = getattr(info, f"{kind}_mesh_size", None), getattr(info, f"{kind}_process_group", None)
        if size is not None:
            settings[f"{kind}_degree"] = int(size)
            settings[f"{kind}_group"] = str(getattr(group, "group_name", ""))
    settings["mixed_precision"] = _precision(getattr(first, "mp_policy", None))
    settings["offload"] = type(getattr(first, "offload_policy", None)).__name__ == "CPUOffloadPolicy"
    settings["unshard_in_backward"] = bool(getattr(first, "unshard_in_backward", True))
    states = [module._get_fsdp_state() for module in modules]
    for way in ("forward", "backward"):
        settings[f"explicit_{way}_prefetch"] = sum(
            bool(getattr(state, f"_states_to_{way}_prefetch", None)) for state in states
        )
    if "shard_degree" not in settings:
        return "ddp", settings
    # By what most units do, since the root's parameters stay by default; True and 1 are not the same here.
    reshard = Counter(map(repr, by_unit := [_reshard_after_forward(group) for group in groups]))
    settings["reshard_after_forward"] = next(each for each in by_unit if repr(each) == reshard.most_common(1)[0][0])
    settings["units_resharding"] = sum(each is not False for each in by_unit)
    return "fsdp", settings


def parameter_groups(module: Any) -> list[Any]:
    """The groups of parameters that ``fully_shard`` gathers together: several in newer versions, at most one before."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else list(filter(None, [getattr(state, "_fsdp_param_group", None)]))


def _reshard_after_forward(group: Any) -> bool | int | None:
    """As given to ``fully_shard``: freed after forward, kept, or spread over so many ranks."""
    after, whole = getattr(group, "post_forward_mesh_info", None), group.mesh_info
    if after is None:
        return False
    return True if after is whole or after == whole else int(after.shard_mesh_size)


def _plain(value: Any) -> bool | str:
    """A switch as it is, ``CPUOffload`` as its switch, a member of an enumeration by its name."""
    value = getattr(value, "offload_params", value)
    return value if isinstance(value, bool) else str(getattr(value, "name", value))


def _precision(policy: Any) -> dict[str, str]:
    """The types in a mixed-precision policy."""
    return {name: str(value) for name in _DTYPES if (value := getattr(policy, name, None)) is not None}
