"""Transformers' Trainer: the arguments that change how it performs, and ranges of its evaluation and checkpoints."""

from __future__ import annotations

from typing import Any, Final

from perfscope.collectors.discovery import JobObjects
from perfscope.collectors.frameworks.hooks import RangedFunction, owner_of
from perfscope.collectors.frameworks.values import settings_of
from perfscope.recording.vocabulary import CHECKPOINT, EVALUATION

PHASES: Final = (
    RangedFunction("transformers.trainer", "Trainer", "evaluate", EVALUATION),
    RangedFunction("transformers.trainer", "Trainer", "predict", EVALUATION),
    RangedFunction("transformers.trainer", "Trainer", "_save_checkpoint", CHECKPOINT),
)

ARGUMENTS: Final = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "max_steps",
    "num_train_epochs", "max_grad_norm", "optim", "bf16", "fp16", "fp16_backend", "half_precision_backend", "tf32",
    "gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing",
    "activation_checkpointing_kwargs", "torch_compile", "torch_compile_backend", "torch_compile_mode",
    "torch_empty_cache_steps", "use_liger_kernel", "dataloader_num_workers", "dataloader_pin_memory",
    "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_drop_last", "group_by_length",
    "train_sampling_strategy", "auto_find_batch_size", "ddp_backend", "ddp_bucket_cap_mb", "ddp_find_unused_parameters",
    "ddp_broadcast_buffers", "ddp_static_graph", "fsdp", "fsdp_config", "accelerator_config", "deepspeed",
    "average_tokens_across_devices", "include_num_input_tokens_seen", "logging_strategy", "logging_steps",
    "logging_nan_inf_filter", "eval_strategy", "evaluation_strategy", "eval_steps", "save_strategy", "save_steps",
    "skip_memory_metrics", "use_cpu",
)  # fmt: skip
"""Of ``TrainingArguments``, in any of its versions; those that a version lacks or that are unset are left out."""


def describe(objects: JobObjects) -> dict[str, Any] | None:
    """The Trainer's arguments under their own names; None without a Trainer."""
    kind = owner_of("transformers.trainer", "Trainer")
    trainers = [each for each in objects.trainers if kind is not None and isinstance(each, kind)]
    if not trainers:
        return None
    return {"trainer": type(trainers[0]).__name__, **settings_of(trainers[0].args, ARGUMENTS)}
