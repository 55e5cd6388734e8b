"""Pipelines of ``torch.distributed.pipelining``: a range around a stage's work on a micro-batch, and the settings."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

from perfscope.collectors.annotate import Annotator
from perfscope.collectors.discovery import Found
from perfscope.collectors.patches import Patches
from perfscope.collectors.problems import Problems
from perfscope.vocabulary import PIPELINE_PREFIX

_STAGE: Final = "torch.distributed.pipelining.stage"
_CHUNKS: Final = {
    "forward_one_chunk": ("fwd_chunk_id", "forward"),
    "backward_one_chunk": ("bwd_chunk_id", "backward"),
    "backward_weight_one_chunk": ("bwd_chunk_id", "backward_weight"),
}
"""Method of a stage -> its first argument, the micro-batch, and the phase."""


def range_micro_batches(patches: Patches, annotator: Annotator, problems: Problems, wanted: Callable[[], bool]) -> None:
    """Have each stage write a range around each micro-batch while ``wanted``; torch's schedules do so only in part.

    Does nothing where the script has not imported pipelining.
    """
    stage: Any = getattr(sys.modules.get(_STAGE), "_PipelineStageBase", object)
    for name, (argument, phase) in _CHUNKS.items():
        if name in vars(stage):
            patches.set(stage, name, _ranged(vars(stage)[name], argument, phase, annotator, problems, wanted))


def _ranged(
    original: Callable[..., Any],
    argument: str,
    phase: str,
    annotator: Annotator,
    problems: Problems,
    wanted: Callable[[], bool],
) -> Callable[..., Any]:
    def begin(stage: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        micro_batch = arguments[0] if arguments else named[argument]
        part = phase
        # backward_one_chunk(bwd_chunk_id, loss, full_backward): without the weights' half it is the inputs' alone.
        if phase == "backward" and not named.get("full_backward", arguments[2] if len(arguments) > 2 else True):
            part = "backward_input"
        return annotator.begin(f"{PIPELINE_PREFIX}{part}|{stage.stage_index}|{micro_batch}")

    @functools.wraps(original)
    def ranged(self: Any, *arguments: Any, **named: Any) -> Any:
        record = problems.guard("ranges of micro-batches", begin, self, arguments, named) if wanted() else None
        try:
            return original(self, *arguments, **named)
        finally:
            if record is not None:
                problems.guard("closing a range", annotator.end, record)

    return ranged


def describe_pipeline(found: Found) -> dict[str, Any] | None:
    """This rank's stages and the schedule that runs them; None without any."""
    import torch.distributed

    trained = set(map(id, found.modules))
    stages = [stage for stage in found.stages if id(stage.submod) in trained] or found.stages
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
    schedule = next((each for each in found.schedules if any(stage is stages[0] for stage in _stages_of(each))), None)
    if schedule is not None:
        settings["schedule"] = type(schedule).__name__
        settings["microbatches"] = int(schedule._n_microbatches)
    return settings


def _stages_of(schedule: Any) -> list[Any]:
    """A schedule's stages: several where it interleaves them."""
    held = vars(schedule)
    return list(held["_stages"]) if "_stages" in held else [held.get("_stage")]
