"""DeepSpeed: ranges for its engines' phases, and the configuration as it is in force."""

from __future__ import annotations

from typing import Any, Final

from perfscope.collectors.discovery import JobObjects
from perfscope.collectors.frameworks.hooks import Hooks, RangedFunction, owner_of, range_collectives
from perfscope.collectors.frameworks.values import clean, plain, settings_of
from perfscope.recording.vocabulary import CHECKPOINT, COMMUNICATION, EVALUATION, GATHER, PIPELINE_PREFIX, REDUCE

_ZERO12: Final = "deepspeed.runtime.zero.stage_1_and_2"
_ZERO3: Final = "deepspeed.runtime.zero.stage3"
_FETCH: Final = "deepspeed.runtime.zero.partitioned_param_coordinator"
_COORDINATOR: Final = "PartitionedParameterCoordinator"
_ENGINE: Final = "deepspeed.runtime.engine"
_PIPELINE: Final = "deepspeed.runtime.pipe.engine"

PHASES: Final = (
    RangedFunction(_ENGINE, "DeepSpeedEngine", "allreduce_gradients", REDUCE, anywhere=True),
    RangedFunction(_ENGINE, "DeepSpeedEngine", "save_checkpoint", CHECKPOINT),
    RangedFunction(_ZERO12, "DeepSpeedZeroOptimizer", "reduce_ipg_grads", REDUCE, anywhere=True),
    RangedFunction(_ZERO12, "", "all_gather_dp_groups", GATHER),
    RangedFunction("deepspeed.runtime.bf16_optimizer", "", "all_gather_dp_groups", GATHER),
    RangedFunction(
        _ZERO3,
        "DeepSpeedZeroOptimizer_Stage3",
        "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads",
        REDUCE,
        anywhere=True,
    ),
    RangedFunction(_FETCH, _COORDINATOR, f"_{_COORDINATOR}__all_gather_params", GATHER, anywhere=True),
    RangedFunction(_PIPELINE, "PipelineEngine", "eval_batch", EVALUATION),
)

COLLECTIVES: Final = (
    "all_gather", "all_gather_base", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast",
    "broadcast_object_list", "gather", "inference_all_reduce", "monitored_barrier", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip
"""Methods of DeepSpeed's communication backend. It took torch's functions before anything here replaced them."""

_ZERO_3_ONLY: Final = ("stage3_", "offload_param", "zero_hpz_", "zero_quantized_", "sub_group_size")
_ZERO: Final = (
    "stage", "overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_partitions",
    "allgather_bucket_size", "round_robin_gradients", "use_multi_rank_bucket_allreduce", "sub_group_size",
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "stage3_module_granularity_threshold", "zero_hpz_partition_size",
    "zero_quantized_weights", "zero_quantized_gradients",
)  # fmt: skip
_OFFLOAD: Final = ("device", "pin_memory", "nvme_path", "ratio", "buffer_count", "pipeline_read", "pipeline_write")
_BATCHES: Final = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "communication_data_type",
)  # fmt: skip


def install(hooks: Hooks) -> None:
    """Give the engines' communication and the pipeline's micro-batches their ranges."""
    backend = owner_of("deepspeed.comm.torch", "TorchBackend")
    if backend is not None:
        range_collectives(hooks, backend, COLLECTIVES, COMMUNICATION)
    pipeline = owner_of(_PIPELINE, "PipelineEngine")
    if pipeline is not None:
        _range_micro_batches(hooks, pipeline)


def _range_micro_batches(hooks: Hooks, pipeline: Any) -> None:
    """The engine looks its instructions up in a table of functions: replace the table.

    A schedule numbers the buffers, not the micro-batches, but carries the micro-batches out in order.
    """
    done: dict[str, int] = {}

    def schedule_begins(*_: Any) -> None:
        done.clear()

    def in_phase(phase: str) -> Any:
        def begin(engine: Any, *_: Any, **__: Any) -> Any:
            if not engine.module.training:
                return None
            micro_batch = done.get(phase, 0)
            done[phase] = micro_batch + 1
            return hooks.annotator.begin(f"{PIPELINE_PREFIX}{phase}|{engine.stage_id}|{micro_batch}")

        return begin

    begins = {"ForwardPass": in_phase("forward"), "BackwardPass": in_phase("backward")}
    table = {
        instruction: hooks.ranged(call, begins[instruction.__name__]) if instruction.__name__ in begins else call
        for instruction, call in vars(pipeline)["_INSTRUCTION_MAP"].items()
    }
    hooks.patches.set(pipeline, "_INSTRUCTION_MAP", table)
    hooks.patches.set(pipeline, "_exec_schedule", hooks.ranged(vars(pipeline)["_exec_schedule"], schedule_begins))


def describe(objects: JobObjects) -> tuple[list[str], dict[str, dict[str, Any]]] | None:
    """Strategies of the engine that trains and their settings; None where no engine does.

    ``deepspeed`` holds the user's JSON under ``config`` and beside it what is in force, DeepSpeed's defaults included,
    spelled as in the JSON.
    """
    engines = objects.of("DeepSpeedEngine")
    if not engines:
        return None
    engine = next((each for each in engines if getattr(each, "optimizer", None) is not None), engines[0])
    zero = _zero_in_force(engine._config)
    basic = getattr(engine, "basic_optimizer", None)
    settings: dict[str, Any] = {
        "engine": type(engine).__name__,
        "config": clean(getattr(engine._config, "_param_dict", None) or {}),
        "zero_optimization": zero,
        **settings_of(engine._config, _BATCHES),
        "precision": "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32",
        "optimizer": type(basic if basic is not None else engine.optimizer).__name__,
        "data_parallel_size": int(engine.dp_world_size),
    }
    stage = int(zero.get("stage", 0))
    strategies: dict[str, dict[str, Any]] = {}
    if stage:
        offloaded: dict[str, Any] = {
            name: zero[name]["device"] for name in ("offload_optimizer", "offload_param") if name in zero
        }
        strategies[f"zero{stage}"] = {"implementation": "deepspeed", "stage": stage, **offloaded}
    elif engine.dp_world_size > 1:
        strategies["ddp"] = {"implementation": "deepspeed"}
    if objects.of("PipelineEngine"):
        strategies["pipeline"] = _pipeline(engine)
    tensor = _tensor_size(engine)
    if tensor > 1:
        strategies["tensor"] = {"implementation": "deepspeed", "degree": tensor}
    return list(strategies), {"deepspeed": settings, **strategies}


def _zero_in_force(config: Any) -> dict[str, Any]:
    """The ZeRO settings in force, spelled as in the JSON; those of stage 3 alone at stage 3."""
    zero = config.zero_config
    dump = getattr(zero, "model_dump", None) or zero.dict
    values: dict[str, Any] = plain(dump(by_alias=True))
    stage = int(values.get("stage") or 0)
    zero = {name: values[name] for name in _ZERO if values.get(name) is not None}
    for name in ("offload_optimizer", "offload_param"):
        offload = values.get(name) or {}
        if offload.get("device") not in (None, "none"):
            zero[name] = {key: offload[key] for key in _OFFLOAD if offload.get(key) is not None}
    if stage < 3:
        zero = {name: value for name, value in zero.items() if not name.startswith(_ZERO_3_ONLY)}
    return zero


def _pipeline(engine: Any) -> dict[str, Any]:
    """Spelled as torch's pipelines are: this rank's stages, all stages, micro-batches of a step."""
    return {
        "implementation": "deepspeed",
        "stages": int(engine.num_stages),
        "stage": [int(engine.stage_id)],
        "virtual_stages": 1,
        "degree": int(engine.num_stages),
        "schedule": "1f1b",
        "microbatches": int(engine.micro_batches),
    }


def _tensor_size(engine: Any) -> int:
    units = getattr(engine, "mpu", None)
    size = getattr(units, "get_tensor_model_parallel_world_size", None) or getattr(
        units, "get_model_parallel_world_size", None
    )
    if size is not None:
        return int(size())
    automatic = getattr(engine, "autotp_size", None)
    return int(automatic()) if automatic is not None else 1
