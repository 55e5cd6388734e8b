"""Accelerate: its settings under the names of its configuration file, and the range of its saved states."""

from __future__ import annotations

from typing import Any, Final

from perfscope.collectors.discovery import JobObjects
from perfscope.collectors.frameworks.hooks import RangedFunction, owner_of
from perfscope.collectors.frameworks.values import plain, settings_of
from perfscope.recording.vocabulary import CHECKPOINT

PHASES: Final = (RangedFunction("accelerate.accelerator", "Accelerator", "save_state", CHECKPOINT),)

_LOADER: Final = (
    "split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking",
    "use_stateful_dataloader",
)  # fmt: skip
_DDP: Final = (
    "broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph",
    "comm_hook", "comm_wrapper",
)  # fmt: skip
_FSDP: Final = (
    "fsdp_version", "sharding_strategy", "reshard_after_forward", "backward_prefetch", "forward_prefetch",
    "auto_wrap_policy", "transformer_cls_names_to_wrap", "min_num_params", "cpu_offload", "limit_all_gathers",
    "use_orig_params", "sync_module_states", "activation_checkpointing", "cpu_ram_efficient_loading",
    "state_dict_type", "mixed_precision_policy",
)  # fmt: skip
_FSDP_SPELLED: Final = {
    "cpu_offload": "fsdp_offload_params",
    "fsdp_version": "fsdp_version",
    "transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
}
"""The plugin's attribute -> the configuration file's key; the others are the attribute's name after ``fsdp_``."""
_WRAP_POLICIES: Final = {
    "transformer_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "size_based_auto_wrap_policy": "SIZE_BASED_WRAP",
}
_DEEPSPEED: Final = (
    "zero_stage", "gradient_accumulation_steps", "gradient_clipping", "offload_optimizer_device",
    "offload_param_device", "zero3_init_flag", "zero3_save_16bit_model", "is_train_batch_min",
)  # fmt: skip


def describe(objects: JobObjects) -> dict[str, Any] | None:
    """Settings of the job's ``Accelerator``; None without one.

    ``num_processes`` and the like as in ``accelerate config``'s file; ``ddp_kwargs`` are the arguments of
    ``DistributedDataParallelKwargs``, ``dataloader_config`` those of ``DataLoaderConfiguration``.
    """
    accelerator = _accelerator(objects)
    if accelerator is None:
        return None
    state = accelerator.state
    settings: dict[str, Any] = {
        "distributed_type": str(accelerator.distributed_type).rpartition(".")[2],
        "mixed_precision": plain(accelerator.mixed_precision),
        "num_processes": accelerator.num_processes,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "dataloader_config": settings_of(getattr(accelerator, "dataloader_config", None), _LOADER),
    }
    dynamo = getattr(getattr(state, "dynamo_plugin", None), "backend", None)
    if dynamo is not None and str(getattr(dynamo, "value", dynamo)).upper() != "NO":
        settings["dynamo_config"] = {"dynamo_backend": plain(dynamo)}
    if getattr(accelerator, "ddp_handler", None) is not None:
        settings["ddp_kwargs"] = settings_of(accelerator.ddp_handler, _DDP)
    fsdp = getattr(state, "fsdp_plugin", None)
    if fsdp is not None:
        settings["fsdp_config"] = _fsdp_config(fsdp)
    deepspeed = getattr(state, "deepspeed_plugin", None)
    if deepspeed is not None:
        settings["deepspeed_config"] = settings_of(deepspeed, _DEEPSPEED)
    return settings


def _fsdp_config(plugin: Any) -> dict[str, Any]:
    """The plugin's attributes as the configuration file spells them and their values."""
    values = settings_of(plugin, _FSDP)
    policy = values.get("auto_wrap_policy")
    if policy is not None:
        values["auto_wrap_policy"] = _WRAP_POLICIES.get(policy, policy)
    offload = getattr(plugin, "cpu_offload", None)
    if offload is not None:  # FSDP1 has an object for yes and for no, FSDP2 one for yes
        values["cpu_offload"] = bool(getattr(offload, "offload_params", offload))
    return {_FSDP_SPELLED.get(name, f"fsdp_{name}"): value for name, value in values.items()}


def autocast_dtype(objects: JobObjects) -> str:
    """Type that the model's forward runs in, of which nothing is seen from outside it; empty without autocast."""
    accelerator = _accelerator(objects)
    if accelerator is None or not getattr(accelerator, "native_amp", False):
        return ""
    return {"bf16": "bfloat16", "fp16": "float16"}.get(str(accelerator.mixed_precision), "")


def _accelerator(objects: JobObjects) -> Any:
    kind = owner_of("accelerate.accelerator", "Accelerator")
    return next((each for each in objects.trainers if kind is not None and isinstance(each, kind)), None)
