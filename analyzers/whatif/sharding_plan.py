"""How a framework would shard: what is gathered and reduced at once, what runs beside it, and what transfers take.

Transfers are fitted where their kind is recorded, else derived.

On a ring an all-reduce is a reduce-scatter and an all-gather (nccl-tests ``doc/PERFORMANCE.md``): either sends half of
its bytes at the same bus bandwidth, and a broadcast n / 2(n - 1) of them. Gloo's all-gather is a ring as well; its
reduce-scatter is a whole all-reduce (torch's ``ProcessGroupGloo``), and broadcasts run two at a time, in log2(n)
rounds. Measured on two ranks of one CPU over a slow link: 0.5, 1.0 and 0.5 of an all-reduce; over a quick link copies
between shards and whole buffers become visible, which cost the same over any link.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from perfscope.analyzers.rank.collectives.communication import DTYPE_BYTES
from perfscope.analyzers.whatif.change import CannotReplay, Context
from perfscope.analyzers.whatif.schedules.ops import RankOp
from perfscope.frozen import dataclass
from perfscope.recording.metadata import ModelMetadata

_DEEPSPEED_BUCKET: Final = 500_000_000
"""DeepSpeed's default ``reduce_bucket_size`` and ``allgather_bucket_size``, elements."""
_FITTED: Final = 0.10
"""Share of a transfer that a model fitted to its kind may miss."""
_DERIVED: Final = 0.15
"""Share that a model derived from another kind may miss."""
_DERIVED_ON_GLOO: Final = 0.30
"""The same on gloo, whose threads share the cores with what computes."""
_COPYING: Final = {"all_gather": 0.25, "reduce_scatter": 0.5}
"""Ns per byte that copies take on a CPU: the whole buffer once; twice for a reduce-scatter, whose input must stay."""


@dataclass(frozen=True)
class ShardingPlan:
    """How the job would be sharded. ``bucket`` bytes are reduced at once, None: a unit. ``blocking``: nothing runs
    beside a reduction; ``on_cpus``: nor beside a gather. A unit's gather moves ``whole`` bytes for each that is
    reduced, because it includes frozen parameters.
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
        """After every micro-batch: DeepSpeed holds no whole gradients from stage 2 on."""
        return self.framework == "deepspeed" and self.stage > 1

    @property
    def reduces_early(self) -> bool:
        """During the backward, not after it."""
        return self.stage > 1 or self.framework != "deepspeed"

    @property
    def reduction(self) -> str:
        """The kind of collective."""
        return "all_reduce" if self.stage == 1 and self.framework == "deepspeed" else "reduce_scatter"


def plan_of(context: Context, stage: int, reduction: RankOp) -> ShardingPlan:
    """As the framework in use would do it; torch where none is known."""
    settings: Mapping[str, Any] = next((run.settings for run in context.runs.values()), {})
    on_cpus = not context.on_devices
    ranks = reduction.collective.size
    whole = next((_whole(run.model) for run in context.runs.values() if run.model is not None), 1.0)
    if settings.get("deepspeed"):
        bucket = deepspeed_bucket(context, reduction.collective.dtype, "reduce_bucket_size")
        overlaps = bool(_zero_optimization(context).get("overlap_comm", stage == 3))
        return ShardingPlan(stage, "deepspeed", ranks, bucket, on_cpus or not overlaps, on_cpus, whole)
    if settings.get("megatron"):
        return ShardingPlan(stage, "megatron", ranks, float(reduction.bytes), on_cpus, on_cpus, whole)
    return ShardingPlan(stage, "torch", ranks, None, on_cpus, on_cpus, whole)


def _whole(model: ModelMetadata) -> float:
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
            zero: Mapping[str, Any] = config["zero_optimization"]
            return zero
    return {}


class Costs:
    """What transfers of a group take, given all ``rank_ops`` recorded there. ``alone`` is the share of its transfer
    that an all-reduce would have taken, had it had the link for itself.
    """

    def __init__(self, context: Context, rank_ops: Sequence[RankOp], alone: float) -> None:
        self._context = context
        self._samples: dict[str, RankOp] = {}
        for kind in sorted({rank_op.collective.kind for rank_op in rank_ops}):
            mine = [rank_op for rank_op in rank_ops if rank_op.collective.kind == kind]
            largest = max(rank_op.bytes for rank_op in mine)
            alike = sorted((own for own in mine if own.bytes == largest), key=lambda own: own.transfer_ns)
            self._samples[kind] = alike[len(alike) // 2]
        ranks = rank_ops[0].collective.size
        self._gloo = any(partial.backend == "gloo" for partial in context.result.partials.values()) or any(
            run.backend == "gloo" for run in context.runs.values()
        )
        broadcast = ranks / max(ranks - 1, 1)
        self._on_wire = {
            "all_reduce": 2.0,
            "all_gather": 1.0,
            "reduce_scatter": 2.0 if self._gloo else 1.0,
            "broadcast": broadcast * math.ceil(math.log2(ranks)) / 2 if self._gloo else broadcast,
        }
        self._alone = alone
        self.gap_ns = float(np.median([rank_op.gap_ns for rank_op in rank_ops]))
        """From when a collective could start to its start, the median."""

    def ns(self, kind: str, size: float) -> float:
        """Transfer of a collective of ``size`` bytes (nccl-tests' size), ns. Raises CannotReplay."""
        source = next((known for known in (kind, "all_reduce", "reduce_scatter") if known in self._samples), None)
        if source is None:
            raise CannotReplay("the sizes of gradient reductions are not recorded; record with shapes")
        sample = self._samples[source]
        alone = self._alone if source == "all_reduce" else 1.0
        latency = self._context.transfer_ns(sample, 0)
        sending = alone * self._context.transfer_ns(sample, round(size)) - alone * latency
        copying = _COPYING.get(kind, 0.0) * size if self._gloo and source != kind else 0.0
        return alone * latency + sending * self._on_wire[kind] / self._on_wire[source] + copying

    def error(self, kind: str) -> float:
        """Share of such a transfer by which it may be wrong."""
        sample = self._samples.get(kind)
        fitted = sample is not None and self._context.model_of(sample.collective.group, kind) is not None
        return _FITTED if fitted else _DERIVED_ON_GLOO if self._gloo else _DERIVED
