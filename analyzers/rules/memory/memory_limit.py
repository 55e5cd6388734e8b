"""Shard more: fires when device memory is nearly full, or the allocator had to retry, and model states are replicated.

An allocator that finds no room gives its cache back to the device and tries again, which synchronizes and takes
milliseconds (``num_alloc_retries`` of ``torch.cuda.memory_stats``). The effect of a ZeRO stage on the step is replayed
where possible; it rarely makes a step faster, so this is information.

What a stage frees is arithmetic. Per parameter, mixed precision with Adam takes 2 + 2 + 12 bytes: parameter and
gradient in 16 bits; a copy, momentum and variance in 32. Stage 1 shards the 12 over the ranks, stage 2 the gradients as
well, stage 3 everything (Rajbhandari et al., "ZeRO", SC'20, section 3 and figure 1).
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.typed import fsdp2, in_deepspeed
from perfscope.frozen import dataclass
from perfscope.results.findings import Action, Evidence, Finding, Obtained, Prediction, Severity, code
from perfscope.results.rows import MemoryRow
from perfscope.text import byte_size

RULE: Final = "memory-limit"
FULL: Final = 0.92
"""Memory is nearly full when live tensors take at least this share of it."""
WORTH: Final = 0.05
"""Least share of the device memory that the next stage frees."""
_STAGE_OF: Final = {"ddp": 0, "zero1": 1, "zero2": 2}
_SHARDING: Final = frozenset(("fsdp", "zero3"))
_DIVIDING: Final = _SHARDING | {"pipeline", "tensor"}
"""Strategies under which ranks hold different parts of the model."""
_SINGLE: Final = (4.0, 4.0, 8.0)
"""Bytes of parameter, gradient, Adam's states where parameters have 32 bits, with or without autocast."""
_MIXED: Final = (2.0, 2.0, 12.0)
_HALF: Final = (2.0, 2.0, 4.0)
"""Everything in 16 bits."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: enough free memory, nothing that could be sharded, or sizes that are not known."""
    stage = next((_STAGE_OF[name] for name in job.info.strategies if name in _STAGE_OF), None)
    states = model_states(job)
    copies = len(job.ranks)
    full = _fullest(job)
    if stage is None or states is None or full is None or copies < 2 or _DIVIDING & set(job.info.strategies):
        return None
    row, capacity = full
    frees = {at: states.bytes_at(stage, copies) - states.bytes_at(at, copies) for at in range(stage + 1, 4)}
    new = next((at for at, freed in frees.items() if freed >= WORTH * capacity), None)
    if new is None:
        return None
    retries = row.allocation_retries or 0
    change = {"zero.stage": str(new)}
    prediction = job.predict(change) if job.predict is not None else None
    return Finding(
        rule=RULE,
        title=f"Rank {row.rank}'s memory is nearly full, and every rank holds the same {_held(states, stage)}",
        severity=Severity.INFO,
        evidence=(
            Evidence("live tensors at their peak", row.allocated_peak_bytes or 0, "bytes", (row.rank,)),
            Evidence("device memory", capacity, "bytes", (row.rank,)),
            Evidence("allocation retries", retries, ranks=(row.rank,)),
            Evidence(f"memory that stage {new} frees per rank", frees[new], "bytes"),
        ),
        action=Action(
            setting="ZeRO stage", old=str(stage), new=str(new), how=_how(job, new),
            costs=f"{_costs(job, prediction)} Frees {byte_size(frees[new])} per rank.",
        ),
        confidence=job.confidence(),
        obtained=Obtained.BOUNDED if prediction is None else Obtained.REPLAYED,
        predicted_step_us=prediction,
        whatif={} if prediction is None else change,
    )  # fmt: skip


def _costs(job: RuleContext, prediction: Prediction | None) -> str:
    """What the stage does to the step."""
    if prediction is None:
        return (
            "Up to stage 2 the communication stays the same (ZeRO, SC'20, section 7); stage 3 gathers parameters for "
            "every forward and backward: 1.5x as much."
        )
    change = job.share(prediction.mid) - 1
    low, high = (job.share(us) - 1 for us in (prediction.low, prediction.high))
    return f"Predicted step time: {_by(change)} ({_by(low)} to {_by(high)})."


def _by(change: float) -> str:
    return f"{abs(change):.0%} {'longer' if change >= 0 else 'shorter'}"


def _fullest(job: RuleContext) -> tuple[MemoryRow, int] | None:
    """The fullest device that is nearly full, and its memory."""
    full = [
        (row, row.capacity_bytes)
        for row in job.summary.memory
        if row.kind == "device" and row.capacity_bytes and row.allocated_peak_bytes
        and (row.allocated_peak_bytes >= FULL * row.capacity_bytes or (row.allocation_retries or 0) > 0)
    ]  # fmt: skip
    return max(full, key=lambda pair: (pair[0].allocated_peak_bytes or 0) / pair[1], default=None)


def _held(states: ModelStates, stage: int) -> str:
    whole = states.bytes_at(stage, 1 << 30)
    return f"{byte_size(whole)} of " + {
        0: "parameters, gradients and optimizer states", 1: "parameters and gradients", 2: "parameters"
    }[stage]  # fmt: skip


def _how(job: RuleContext, stage: int) -> str:
    if job.settings("deepspeed"):
        return in_deepspeed(f'{{"zero_optimization": {{"stage": {stage}}}}}')
    if job.framework == "megatron":
        return code("shell", "--use-distributed-optimizer" if stage == 1 else "--use-torch-fsdp2")
    if stage == 1:
        return "In place of the optimizer, with its class and arguments:\n" + code(
            "python",
            "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
            "optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=lr)",
        )
    return f"In place of DistributedDataParallel. {fsdp2(reshard_after_forward=stage == 3)}"


@dataclass(frozen=True)
class ModelStates:
    """``parameters`` elements of the whole model, and bytes of each, its gradient and its optimizer states."""

    parameters: int
    each: tuple[float, float, float]

    def bytes_at(self, stage: int, ranks: int) -> float:
        """On each of ``ranks`` that share the model, at a ZeRO stage (0 to 3)."""
        parameter, gradient, states = self.each
        first_sharded = {0: 3, 1: 2, 2: 1, 3: 0}[stage]
        whole = sum((parameter, gradient, states)[:first_sharded])
        return self.parameters * (whole + (sum(self.each) - whole) / ranks)


def model_states(job: RuleContext) -> ModelStates | None:
    """None where the run did not record its model, or only a part of its ranks did."""
    models = [run.model for run in job.runs.values() if run.model is not None]
    if not models or len(models) != len(job.ranks):
        return None
    sharded = _SHARDING & set(job.info.strategies)
    # Where parameters are sharded each rank records its part, and each replica of a shard again.
    replicas = job.settings("fsdp").get("replicate_degree")
    copies = replicas if isinstance(replicas, int) and replicas > 0 else 1
    elements = sum(model.parameters for model in models) // copies if sharded else max(m.parameters for m in models)
    dtypes = {dtype.rpartition(".")[2] for model in models for dtype in model.dtypes}
    if "float32" in dtypes:
        return ModelStates(elements, _SINGLE)
    engine = bool(job.settings("deepspeed") or job.settings("megatron"))
    return ModelStates(elements, _MIXED if engine else _HALF)
