"""torch itself: ranges of its collectives, of micro-batches, of ``torch.save``, of data loaders that start and stop
workers and of their samplers; settings of its pipelines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from perfscope.collectors.discovery import JobObjects
from perfscope.collectors.frameworks.hooks import Hooks, RangedFunction, owner_of, range_collectives
from perfscope.recording.vocabulary import (
    CHECKPOINT,
    COMMUNICATION,
    DATALOADER_SAMPLER,
    DATALOADER_START,
    DATALOADER_STOP,
    PIPELINE_PREFIX,
)

PHASES: Final = (
    RangedFunction("torch.utils.data", "DataLoader", "__iter__", DATALOADER_START),
    RangedFunction(
        "torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter", "_shutdown_workers", DATALOADER_STOP
    ),
    RangedFunction("torch.utils.data.dataloader", "_BaseDataLoaderIter", "_next_index", DATALOADER_SAMPLER),
    RangedFunction("torch", "", "save", CHECKPOINT),
    RangedFunction("torch.distributed.checkpoint", "", "save", CHECKPOINT),
    RangedFunction("torch.distributed.checkpoint", "", "async_save", CHECKPOINT),
)

COLLECTIVES: Final = (
    "_all_gather_base", "_reduce_scatter_base", "all_gather", "all_gather_coalesced", "all_gather_into_tensor",
    "all_gather_object", "all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object",
    "monitored_barrier", "recv", "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list",
)  # fmt: skip
"""Functions of ``torch.distributed``. Not ``isend`` and ``irecv``: ``batch_isend_irecv`` compares them by identity."""

_CHUNKS: Final = {
    "forward_one_chunk": ("fwd_chunk_id", "forward"),
    "backward_one_chunk": ("bwd_chunk_id", "backward"),
    "backward_weight_one_chunk": ("bwd_chunk_id", "backward_weight"),
}
"""Method of a stage -> its first argument, the micro-batch, and the phase."""


def install(hooks: Hooks) -> None:
    """Give the collectives their ranges, and the pipelines' micro-batches; where one of them fails, the other stays."""
    hooks.problems.guard("the ranges of torch's collectives", _range_collectives, hooks)
    hooks.problems.guard("the ranges of torch's pipelines", _range_micro_batches, hooks)


def _range_collectives(hooks: Hooks) -> None:
    distributed = owner_of("torch.distributed", "")
    if distributed is not None:
        range_collectives(hooks, distributed, COLLECTIVES, COMMUNICATION)


def _range_micro_batches(hooks: Hooks) -> None:
    """Torch's schedules write ranges for some micro-batches only."""
    stage = owner_of("torch.distributed.pipelining.stage", "_PipelineStageBase")
    for name, (argument, phase) in _CHUNKS.items():
        if stage is not None and name in vars(stage):
            hooks.patches.set(stage, name, hooks.ranged(vars(stage)[name], _begin_chunk(hooks, argument, phase)))


def _begin_chunk(hooks: Hooks, argument: str, phase: str) -> Callable[..., Any]:
    def begin(stage: Any, *arguments: Any, **named: Any) -> Any:
        micro_batch = arguments[0] if arguments else named[argument]
        part = phase
        # backward_one_chunk(bwd_chunk_id, loss, full_backward): without the weights' half it is the inputs' alone.
        if phase == "backward" and not named.get("full_backward", arguments[2] if len(arguments) > 2 else True):
            part = "backward_input"
        return hooks.annotator.begin(f"{PIPELINE_PREFIX}{part}|{stage.stage_index}|{micro_batch}")

    return begin


def describe_pipeline(objects: JobObjects) -> tuple[str, dict[str, Any]] | None:
    """``pipeline`` and its settings: this rank's stages and the schedule that runs them; None without any."""
    import torch.distributed

    trained = set(map(id, objects.modules))
    stages = [stage for stage in objects.stages if id(stage.submod) in trained] or objects.stages
    if not stages:
        return None
    group = stages[0].group or torch.distributed.group.WORLD
    indices = sorted({int(stage.stage_index) for stage in stages})
    settings: dict[str, Any] = {
        "stages": int(stages[0].num_stages),
        "stage": indices,
        "virtual_stages": len(indices),
        "degree": int(stages[0].group_size),
        "group": str(getattr(group, "group_name", "")),
    }
    schedule = next((each for each in objects.schedules if any(stage is stages[0] for stage in _stages_of(each))), None)
    if schedule is not None:
        settings["schedule"] = type(schedule).__name__
        settings["microbatches"] = int(schedule._n_microbatches)
    return "pipeline", settings


def _stages_of(schedule: Any) -> list[Any]:
    """A schedule's stages: several where it interleaves them."""
    held = vars(schedule)
    return list(held["_stages"]) if "_stages" in held else [held.get("_stage")]
