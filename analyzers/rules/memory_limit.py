"""Shard more: fires when device memory is nearly full, or the allocator had to start over, and states are replicated.

An allocator that finds no room gives its cache back to the device and asks again, which synchronises and takes
milliseconds (``num_alloc_retries`` of ``torch.cuda.memory_stats``). What a ZeRO stage frees is arithmetic: see
``model_states``. What it costs is replayed where that can be; it rarely makes a step quicker, so it is information.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.frameworks import framework, settings_of
from perfscope.analyzers.rules.model_states import ModelStates, model_states
from perfscope.analyzers.rules.traffic import gib, sure
from perfscope.findings import Action, Evidence, Finding, Obtained, Prediction, Severity
from perfscope.summary import MemoryRow

RULE: Final = "memory-limit"
FULL: Final = 0.92
"""Share of a device's memory in live tensors from which it is nearly full."""
WORTH: Final = 0.05
"""Share of a device's memory that the next stage must free."""
_STAGE_OF: Final = {"ddp": 0, "zero1": 1, "zero2": 2}


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: room enough, nothing that could be sharded, or sizes that are not known."""
    stage = next((_STAGE_OF[name] for name in facts.strategies if name in _STAGE_OF), None)
    states = model_states(facts)
    copies = len(facts.ranks)
    full = _fullest(facts)
    if stage is None or states is None or full is None or copies < 2 or _is_mixed(facts):
        return None
    row, capacity = full
    frees = {at: states.bytes_at(stage, copies) - states.bytes_at(at, copies) for at in range(stage + 1, 4)}
    new = next((at for at, freed in frees.items() if freed >= WORTH * capacity), None)
    if new is None:
        return None
    retries = row.allocation_retries or 0
    change = {"zero.stage": str(new)}
    prediction = facts.predict(change) if facts.predict is not None else None
    return Finding(
        rule=RULE,
        title=f"Rank {row.rank}'s memory is nearly full, and every rank holds the same {_held(states, stage)}",
        severity=Severity.INFO,
        evidence=(
            Evidence(what="live tensors at their peak", value=row.allocated_peak_bytes or 0, unit="bytes",
                     ranks=(row.rank,)),
            Evidence(what="device memory", value=capacity, unit="bytes", ranks=(row.rank,)),
            Evidence(what="times that the allocator had to start over", value=retries, unit="", ranks=(row.rank,)),
            Evidence(what=f"memory that stage {new} would free on each rank", value=frees[new], unit="bytes"),
        ),
        action=Action(
            setting="ZeRO stage", old=str(stage), new=str(new), how=_how(facts, new),
            costs=f"{_costs(facts, prediction)} Frees {gib(frees[new])} on each rank.",
        ),
        confidence=sure(facts),
        obtained=Obtained.BOUNDED if prediction is None else Obtained.REPLAYED,
        predicted_step_ns=prediction,
        whatif={} if prediction is None else change,
    )  # fmt: skip


def _costs(facts: JobFacts, prediction: Prediction | None) -> str:
    """What the stage does to the step."""
    if prediction is None:
        return (
            "No more communication up to stage 2 (ZeRO, SC'20, section 7); stage 3 gathers parameters for every "
            "forward and backward: half as much again."
        )
    change = prediction.mid / 1e3 / facts.step_time_us - 1
    low, high = (ns / 1e3 / facts.step_time_us - 1 for ns in (prediction.low, prediction.high))
    return f"By replay a step takes {_by(change)} ({_by(low)} to {_by(high)})."


def _by(change: float) -> str:
    return f"{abs(change):.0%} {'longer' if change >= 0 else 'less'}"


def _fullest(facts: JobFacts) -> tuple[MemoryRow, int] | None:
    """The fullest device that is nearly full, and its memory."""
    found = [
        (row, row.capacity_bytes)
        for row in facts.memory
        if row.kind == "device" and row.capacity_bytes and row.allocated_peak_bytes
        and (row.allocated_peak_bytes >= FULL * row.capacity_bytes or (row.allocation_retries or 0) > 0)
    ]  # fmt: skip
    return max(found, key=lambda pair: (pair[0].allocated_peak_bytes or 0) / pair[1], default=None)


def _is_mixed(facts: JobFacts) -> bool:
    """Ranks that hold different parts of the model are no copies of each other."""
    return any(name in facts.strategies for name in ("pipeline", "tensor", "fsdp", "zero3"))


def _held(states: ModelStates, stage: int) -> str:
    whole = states.bytes_at(stage, 1 << 30)
    return f"{gib(whole)} of " + {
        0: "parameters, gradients and optimizer states", 1: "parameters and gradients", 2: "parameters"
    }[stage]  # fmt: skip


def _how(facts: JobFacts, stage: int) -> str:
    if settings_of(facts, "deepspeed"):
        return f'"zero_optimization": {{"stage": {stage}}} in the DeepSpeed JSON.'
    if framework(facts) == "megatron":
        return "--use-distributed-optimizer" if stage == 1 else "--use-torch-fsdp2 in place of Megatron's own DDP"
    if stage == 1:
        return (
            "ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, …), from "
            "torch.distributed.optim, in place of the optimizer."
        )
    kept = "" if stage == 3 else ", reshard_after_forward=False"
    return f"fully_shard(module{kept}) for every block, then the model, in place of DistributedDataParallel."
