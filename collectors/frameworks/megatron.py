"""Megatron (megatron-core, Megatron-LM): ranges for its schedules and timers, and the settings of its parallelism.

Timers that ``--timing-log-level`` turns off get ranges too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any, Final

from perfscope.collectors.annotate import Annotator
from perfscope.collectors.discovery import JobObjects
from perfscope.collectors.frameworks.hooks import Call, Hooks, RangedFunction, owner_of, range_collectives
from perfscope.collectors.frameworks.values import settings_of
from perfscope.recording.vocabulary import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION,
    EVALUATION,
    MEGATRON_TIMER_PREFIX,
    PIPELINE_PREFIX,
)

_TIMERS: Final = "megatron.core.timers"
_SCHEDULES: Final = "megatron.core.pipeline_parallel.schedules"

PHASES: Final = (
    # Calls autograd's engine by itself, past torch.autograd.backward.
    RangedFunction(_SCHEDULES, "", "custom_backward", BACKWARD),
    RangedFunction("megatron.core.dist_checkpointing", "", "save", CHECKPOINT),
    RangedFunction("megatron.training.training", "", "save_checkpoint_and_time", CHECKPOINT),
    RangedFunction("megatron.training.training", "", "evaluate", EVALUATION),
)

_ALIASES: Final = ("dist_all_gather_func", "dist_reduce_scatter_func")
"""Names under which Megatron's modules keep torch's functions, taken before anything here replaced them."""

_SIZES: Final = {
    "tensor_model_parallel_size": "get_tensor_model_parallel_world_size",
    "pipeline_model_parallel_size": "get_pipeline_model_parallel_world_size",
    "virtual_pipeline_model_parallel_size": "get_virtual_pipeline_model_parallel_world_size",
    "context_parallel_size": "get_context_parallel_world_size",
    "expert_model_parallel_size": "get_expert_model_parallel_world_size",
    "expert_tensor_parallel_size": "get_expert_tensor_parallel_world_size",
    "data_parallel_size": "get_data_parallel_world_size",
}
"""Megatron's argument -> function of ``megatron.core.parallel_state``."""

_MODEL: Final = (
    "sequence_parallel", "tp_comm_overlap", "overlap_p2p_comm", "batch_p2p_comm", "overlap_p2p_comm_warmup_flush",
    "microbatch_group_size_per_vp_stage", "deallocate_pipeline_outputs", "defer_embedding_wgrad_compute",
    "delay_wgrad_compute", "overlap_moe_expert_parallel_comm", "moe_token_dispatcher_type", "num_moe_experts",
    "gradient_accumulation_fusion", "recompute_granularity", "recompute_method", "recompute_num_layers",
    "recompute_modules", "cpu_offloading", "bf16", "fp16", "fp8", "params_dtype", "pipeline_dtype", "num_layers",
    "hidden_size", "num_attention_heads", "barrier_with_L1_time",
)  # fmt: skip
_DDP: Final = (
    "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "align_param_gather", "bucket_size",
    "grad_reduce_in_fp32", "average_in_collective", "data_parallel_sharding_strategy", "use_megatron_fsdp",
    "num_distributed_optimizer_instances", "nccl_ub", "pad_buckets_for_high_nccl_busbw",
)  # fmt: skip
_OPTIMIZER: Final = (
    "optimizer", "use_distributed_optimizer", "overlap_param_gather", "overlap_param_gather_with_optimizer_step",
    "optimizer_cpu_offload", "optimizer_offload_fraction", "use_precision_aware_optimizer", "clip_grad",
)  # fmt: skip
_ARGUMENTS: Final = (
    "micro_batch_size", "global_batch_size", "seq_length", "num_workers", "overlap_grad_reduce", "overlap_param_gather",
    "ddp_bucket_size", "ddp_num_buckets", "use_distributed_optimizer", "use_flash_attn", "transformer_impl",
    "empty_unused_memory_level", "check_for_nan_in_loss_and_grad", "timing_log_level", "manual_gc",
    "manual_gc_interval", "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
    "tp_comm_overlap", "recompute_granularity", "eval_interval", "save_interval", "log_interval",
)  # fmt: skip
"""Of Megatron-LM's own command line, under its own names; other trainers have none."""


def install(hooks: Hooks) -> None:
    """Give the schedules' communication, micro-batches and timers their ranges."""
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core.") and module is not None:
            range_collectives(hooks, module, _ALIASES, COMMUNICATION)
    schedules = sys.modules.get(_SCHEDULES)
    if schedules is not None:
        _range_micro_batches(hooks, schedules)
    range_timers(hooks)


def _range_micro_batches(hooks: Hooks, schedules: Any) -> None:
    """Around each micro-batch's forward and backward in a pipeline. A backward is known by what its forward put out."""
    state: Any = sys.modules["megatron.core.parallel_state"]
    forwards: dict[int, tuple[int, int]] = {}

    def begin_forward(*args: Any, current_microbatch: int | None = None, vp_stage: int | None = None, **_: Any) -> Any:
        hooks.observed["num_microbatches"] = int(args[3])
        ranks = state.get_pipeline_model_parallel_world_size()
        if ranks == 1 or current_microbatch is None or not args[2].training:
            return None
        stage = (vp_stage or 0) * ranks + state.get_pipeline_model_parallel_rank()
        name = f"{PIPELINE_PREFIX}forward|{stage}|{current_microbatch}"
        return hooks.annotator.begin(name), (stage, current_microbatch)

    def end_forward(record: Any, result: Any) -> None:
        hooks.annotator.end(record[0])
        first = _first_tensor(result)
        if first is not None:
            forwards[id(first)] = record[1]

    def begin_backward(_input: Any, output: Any, *_: Any) -> Any:
        known = forwards.pop(id(_first_tensor(output)), None)
        return None if known is None else hooks.annotator.begin(f"{PIPELINE_PREFIX}backward|{known[0]}|{known[1]}")

    forward, backward = vars(schedules)["forward_step"], vars(schedules)["backward_step"]
    hooks.patches.set(schedules, "forward_step", hooks.ranged(forward, begin_forward, end_forward))
    hooks.patches.set(schedules, "backward_step", hooks.ranged(backward, begin_backward))


def _first_tensor(value: Any) -> Any:
    """The tensor in ``[[tensor], tokens]``, however it is packed."""
    while isinstance(value, (list, tuple)):
        if not value:
            return None
        value = value[0]
    return value


def describe(
    objects: JobObjects, optimizers: Iterable[Any], observed: dict[str, Any]
) -> tuple[list[str], dict[str, dict[str, Any]]] | None:
    """Strategies of a job that has set up Megatron's groups, and their settings; None where none has.

    ``megatron`` holds everything under the names of Megatron's arguments.
    """
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    settings = {name: _size(state, function) for name, function in _SIZES.items()}
    settings = {name: size for name, size in settings.items() if size is not None}
    for thing, names in (
        (getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None), _ARGUMENTS),
        (_first(objects.modules, "config", "ModelParallelConfig", "model_parallel_config"), _MODEL),
        (_first(optimizers, "config", "OptimizerConfig", "optimizer.optimizer_config"), _OPTIMIZER),
        (_first(objects.modules, "ddp_config", "DistributedDataParallelConfig", "distributed"), _DDP),
    ):
        settings.update(settings_of(thing, names))
    if "num_microbatches" in observed:
        settings["num_microbatches"] = observed["num_microbatches"]
    strategies = _strategies(settings, state)
    return list(strategies), {"megatron": settings, **strategies}


def _strategies(settings: dict[str, Any], state: Any) -> dict[str, dict[str, Any]]:
    strategies: dict[str, dict[str, Any]] = {}
    mine = {"implementation": "megatron"}
    if settings.get("data_parallel_size", 1) > 1:
        sharded = str(settings.get("data_parallel_sharding_strategy", "no_shard"))
        if settings.get("use_megatron_fsdp") and sharded != "no_shard":
            strategies["fsdp"] = {**mine, "data_parallel_sharding_strategy": sharded}
        elif settings.get("use_distributed_optimizer"):
            strategies["zero1"] = {
                **mine,
                **_some(settings, ("overlap_grad_reduce", "overlap_param_gather", "bucket_size")),
            }
        else:
            strategies["ddp"] = {**mine, **_some(settings, ("overlap_grad_reduce", "bucket_size"))}
    ranks, chunks = settings["pipeline_model_parallel_size"], settings.get("virtual_pipeline_model_parallel_size", 1)
    if ranks > 1:
        rank = int(state.get_pipeline_model_parallel_rank())
        strategies["pipeline"] = {
            **mine,
            "stages": ranks * chunks,
            "stage": [chunk * ranks + rank for chunk in range(chunks)],
            "virtual_stages": chunks,
            "degree": ranks,
            "schedule": "interleaved" if chunks > 1 else "1f1b",
            "microbatches": settings.get("num_microbatches"),
        }
    if settings["tensor_model_parallel_size"] > 1:
        strategies["tensor"] = {**mine, "degree": settings["tensor_model_parallel_size"]}
    return strategies


def _some(settings: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: settings[name] for name in names if name in settings}


def _size(state: Any, function: str) -> int | None:
    """A size that Megatron's groups have; None for one that this version does not know or the job does not use."""
    call = getattr(state, function, None)
    try:
        size = call() if call is not None else None
    except (AssertionError, RuntimeError):  # a group that was never set up
        return None
    return int(size) if size is not None else None


def _first(things: Iterable[Any], attribute: str, kind: str, module: str) -> Any:
    """The first ``attribute`` among things that is a ``megatron.core.MODULE.KIND``; None without."""
    owner = owner_of(f"megatron.core.{module}", kind)
    if owner is None:
        return None
    candidates = (vars(thing).get(attribute) for thing in things if hasattr(thing, "__dict__"))
    return next((each for each in candidates if isinstance(each, owner)), None)


def range_timers(hooks: Hooks) -> None:
    """Write a range from a timer's start to its stop. Does nothing where Megatron's timers were not imported."""
    timers = owner_of(_TIMERS, "Timers")
    if timers is None:
        return
    running = _Running(hooks.annotator)
    hooks.at_end.append(running.close)
    hooks.patches.set(timers, "__call__", running.remembering(vars(timers)["__call__"]))
    for kind in ("Timer", "DummyTimer"):
        owner: Any = owner_of(_TIMERS, kind)
        for attribute, then in (("start", running.started), ("stop", running.stopped)):
            hooks.patches.set(owner, attribute, hooks.followed(vars(owner)[attribute], then))


class _Running:
    """The timers that run, by name.

    Timers that are turned off are one object for all: it stands for the name under which it was last asked for, which
    is how Megatron uses it, ``timers("forward-compute", log_level=2).start()``.
    """

    def __init__(self, annotator: Annotator) -> None:
        self._annotator = annotator
        self._opened: dict[str, Any] = {}
        self._asked: dict[int, str] = {}

    def remembering(self, call: Call) -> Call:
        """``Timers.__call__``, which remembers the name that it was asked for."""

        @functools.wraps(call)
        def asked(this: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            timer = call(this, name, *args, **kwargs)
            self._asked[id(timer)] = name
            return timer

        return asked

    def started(self, timer: Any) -> None:
        """A timer has started."""
        name = self._name(timer)
        if name not in self._opened:
            self._opened[name] = self._annotator.open(f"{MEGATRON_TIMER_PREFIX}{name}")

    def stopped(self, timer: Any) -> None:
        """A timer has stopped, perhaps one that had started before the capture."""
        opened = self._opened.pop(self._name(timer), None)
        if opened is not None:
            self._annotator.close(opened)

    def close(self) -> None:
        """The capture ends: close what is open, innermost first."""
        while self._opened:
            self._annotator.close(self._opened.popitem()[1])

    def _name(self, timer: Any) -> str:
        return self._asked.get(id(timer)) or str(getattr(timer, "name", ""))
