"""How a framework shards: at which stage, what is gathered and reduced at once, and what runs beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from perfscope.analyzers.collectives.communication import DTYPE_BYTES
from perfscope.analyzers.whatif.change import Context
from perfscope.analyzers.whatif.script import Part
from perfscope.metadata import ModelRecord

_DEEPSPEED_BUCKET: Final = 500_000_000
"""DeepSpeed's default ``reduce_bucket_size`` and ``allgather_bucket_size``, elements."""


@dataclass(frozen=True)
class Plan:
    """How the job is to be sharded. ``bucket`` bytes are reduced at once, None: a unit. ``blocking``: nothing runs
    beside a reduction; ``on_cpus``: nor beside a gather. A unit's gather brings ``whole`` bytes for each that is
    reduced: frozen parameters, too.
    """

    stage: int
    framework: str
    ranks: int
    bucket: float | None
    blocking: bool
    on_cpus: bool
    whole: float

    @property
    def gathers_units(self) -> bool:
        """Unit by unit before their forward, not everything after the optimizer."""
        return self.stage == 3 or (self.stage == 2 and self.framework == "torch")

    @property
    def reduces_always(self) -> bool:
        """After every micro-batch: DeepSpeed keeps no whole gradients from stage 2 on."""
        return self.framework == "deepspeed" and self.stage > 1

    @property
    def reduces_early(self) -> bool:
        """During the backward, not after it."""
        return self.stage > 1 or self.framework != "deepspeed"

    @property
    def reduction(self) -> str:
        """The kind of collective."""
        return "all_reduce" if self.stage == 1 and self.framework == "deepspeed" else "reduce_scatter"


def plan_of(context: Context, stage: int, reduction: Part) -> Plan:
    """As the framework in use would do it; torch where none is known."""
    settings: Mapping[str, Any] = next((run.settings for run in context.runs.values()), {})
    on_cpus = not any(partial.has_device_work for partial in context.result.partials.values())
    ranks = reduction.meeting.size
    whole = next((_whole(run.model) for run in context.runs.values() if run.model is not None), 1.0)
    if settings.get("deepspeed"):
        bucket = deepspeed_bucket(context, reduction.meeting.dtype, "reduce_bucket_size")
        overlaps = bool(_zero_optimization(context).get("overlap_comm", stage == 3))
        return Plan(stage, "deepspeed", ranks, bucket, on_cpus or not overlaps, on_cpus, whole)
    if settings.get("megatron"):
        return Plan(stage, "megatron", ranks, float(reduction.meeting.bytes or 0), on_cpus, on_cpus, whole)
    return Plan(stage, "torch", ranks, None, on_cpus, on_cpus, whole)


def _whole(model: ModelRecord) -> float:
    """Bytes of all parameters for each of those that are trained."""
    return max(model.parameter_bytes / model.trainable_bytes, 1.0) if model.trainable_bytes else 1.0


def deepspeed_bucket(context: Context, dtype: str | None, name: str) -> float:
    """Bytes of a bucket of DeepSpeed's, whose ``name`` gives its elements; its default where that is not recorded."""
    return float(_zero_optimization(context).get(name, _DEEPSPEED_BUCKET)) * DTYPE_BYTES.get(dtype or "", 4)


def _zero_optimization(context: Context) -> Mapping[str, Any]:
    """That part of the DeepSpeed JSON; empty without."""
    for run in context.runs.values():
        config = run.settings.get("deepspeed", {}).get("config") or {}
        if isinstance(config.get("zero_optimization"), dict):
            found: Mapping[str, Any] = config["zero_optimization"]
            return found
    return {}
