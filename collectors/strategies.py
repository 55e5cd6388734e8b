"""Which parallel strategies the job uses, and with which settings, spelled as the frameworks spell them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final

from perfscope.collectors.discovery import Found, loaded
from perfscope.collectors.problems import Problems

Settings = dict[str, dict[str, Any]]

_DDP_LOGGED: Final = (
    "gradient_as_bucket_view", "find_unused_parameters", "broadcast_buffers", "has_sync_bn", "num_buckets_reduced",
    "total_parameter_size_bytes", "unused_parameter_size", "comm_hook",
)  # fmt: skip
_DDP_FLAGS: Final = ("gradient_as_bucket_view", "find_unused_parameters", "broadcast_buffers", "has_sync_bn")
_FSDP: Final = ("sharding_strategy", "backward_prefetch", "forward_prefetch", "limit_all_gathers", "cpu_offload")
_MEBIBYTE: Final = 1 << 20


def describe_strategies(
    found: Found, optimizers: Iterable[Any], world_size: int, problems: Problems
) -> tuple[tuple[str, ...], Settings]:
    """The strategies in use, and their settings by strategy."""
    optimizers = list(optimizers)
    names: list[str] = []
    settings: Settings = {}
    for describe in (_ddp, _fsdp, _fully_shard, _deepspeed):
        described = problems.guard(f"describing {describe.__name__.strip('_')}", describe, found)
        if described is not None:
            names.append(described[0])
            settings[described[0]] = {**described[1], **settings.get(described[0], {})}
    if any(type(optimizer).__name__ == "ZeroRedundancyOptimizer" for optimizer in optimizers):
        names.append("zero1")
        settings["zero1"] = {"optimizer": "ZeroRedundancyOptimizer"}
    if found.pipeline:
        names.append("pipeline")
    if problems.guard("looking for tensor parallelism", _is_tensor_parallel, found):
        names.append("tensor")
    if not names and world_size == 1:
        names.append("single")
    horovod: Any = sys.modules.get("horovod.torch")
    if horovod is not None:
        settings["horovod"] = {"size": world_size}
    return tuple(dict.fromkeys(names)), settings


def _ddp(found: Found) -> tuple[str, dict[str, Any]] | None:
    modules = found.of("DistributedDataParallel")
    if not modules:
        return None
    ddp = modules[0]
    settings: dict[str, Any] = {"bucket_cap_mb": ddp.bucket_bytes_cap / _MEBIBYTE}
    settings["static_graph"] = bool(ddp.static_graph)
    logged = ddp._get_ddp_logging_data()
    for name in _DDP_LOGGED:
        if name in logged:
            settings[name] = bool(logged[name]) if name in _DDP_FLAGS else logged[name]
    sizes = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or ""
    settings["bucket_bytes"] = [int(size) for size in str(sizes).split(",") if size.strip().isdecimal()]
    if len(modules) > 1:
        settings["instances"] = len(modules)
    return "ddp", settings


def _fsdp(found: Found) -> tuple[str, dict[str, Any]] | None:
    modules = found.of("FullyShardedDataParallel")
    if not modules:
        return None
    root = modules[0]
    settings: dict[str, Any] = {"version": 1, "units": len(modules)}
    for name in _FSDP:
        value = vars(root).get(name)
        if value is not None:
            settings[name] = getattr(value, "name", None) or str(value) if not isinstance(value, bool) else value
    settings["mixed_precision"] = _precision(vars(root).get("mixed_precision"))
    return "fsdp", settings


def _fully_shard(found: Found) -> tuple[str, dict[str, Any]] | None:
    modules = found.of("FSDPModule")
    if not modules:
        return None
    settings: dict[str, Any] = {"version": 2, "units": len(modules)}
    groups = [group for module in modules for group in _parameter_groups(module)]
    if groups:  # the root has none where every parameter lies in a unit below it
        reshard = getattr(groups[0], "_reshard_after_forward", None)
        settings["reshard_after_forward"] = bool(reshard) if reshard is not None else None
        settings["mixed_precision"] = _precision(getattr(groups[0], "mp_policy", None))
    return "fsdp", settings


def _parameter_groups(module: Any) -> list[Any]:
    """The groups of parameters that ``fully_shard`` gathers together: several in newer versions, at most one before."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else list(filter(None, [getattr(state, "_fsdp_param_group", None)]))


def _deepspeed(found: Found) -> tuple[str, dict[str, Any]] | None:
    engines = found.of("DeepSpeedEngine")
    if not engines:
        return None
    engine = engines[0]
    stage = int(engine.zero_optimization_stage())
    config = getattr(engine._config, "_param_dict", {})
    settings: dict[str, Any] = {
        name: value
        for name, value in config.items()
        if name in ("zero_optimization", "bf16", "fp16", "activation_checkpointing", "communication_data_type")
    }
    settings["stage"] = stage
    settings["gradient_accumulation_steps"] = int(engine.gradient_accumulation_steps())
    return (f"zero{stage}" if stage else "ddp"), settings


def _precision(policy: Any) -> dict[str, str]:
    """The types in a mixed-precision policy."""
    names = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")
    return {name: str(value) for name in names if (value := getattr(policy, name, None)) is not None}


def _is_tensor_parallel(found: Found) -> bool:
    """Is a parameter split along a mesh dimension that is not FSDP's own?"""
    kinds = loaded((("torch.distributed.tensor", "DTensor"), ("torch.distributed._tensor", "DTensor")))
    if not kinds:
        return False
    sharded = bool(found.of("FSDPModule"))
    for root in found.roots:
        for parameter in root.parameters():
            if isinstance(parameter, kinds):
                mesh: Any = parameter.device_mesh
                names = " ".join(mesh.mesh_dim_names or ()).lower()
                if not sharded or (mesh.ndim > 1 and ("tp" in names or "tensor" in names)):
                    return True
    return False
