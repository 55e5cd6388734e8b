"""Out of memory: fires where a memory snapshot holds an allocation that failed.

What to change follows from what the allocator had at that moment, and from who holds the memory: what grew from step to
step, free pieces that were too small, other users of the device, one request that is too large, or tensors that fill
it, of which the largest phase decides. Sources: torch ``docs/source/notes/cuda.rst`` (``expandable_segments``),
``torch.utils.checkpoint``; ZeRO, SC'20.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.memory.memory_growth import let_go
from perfscope.analyzers.rules.typed import fsdp2
from perfscope.results.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, code
from perfscope.results.memory.snapshots import GrowthRow, HolderRow, OutOfMemoryRow
from perfscope.text import byte_size, percent, plural

RULE: Final = "out-of-memory"

GROWN: Final = 0.2
"""Share of what is allocated that grew from step to step, from which that is the cause."""
EXPANDABLE: Final = "PYTORCH_CUDA_ALLOC_CONF"
SET_EXPANDABLE: Final = (
    "Segments that grow instead of new ones beside them, before the training is started:\n"
    + code("shell", f"export {EXPANDABLE}=expandable_segments:True")
)  # fmt: skip

_SMALLER: Final = "a smaller micro-batch, with as many more micro-batches in a step"
_CHECKPOINTING: Final = (
    "Compute the blocks' activations again in the backward instead of keeping them; with a list of the modules inside "
    "the model for blocks:\n"
    + code(
        "python",
        "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing\n"
        "apply_activation_checkpointing(model, check_fn=lambda module: module in blocks)",
    )
    + f"\nOr {_SMALLER}."
)


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no snapshot, or no allocation that failed."""
    failed = job.summary.snapshots.ooms if job.summary.snapshots is not None else ()
    if not failed:
        return None
    row, others = failed[0], len({(each.rank, each.device) for each in failed}) - 1
    held, grown = _held(job, row), _grown(job, row)
    also = f" (and {plural(others, 'more device')})" if others else ""
    return Finding(
        rule=RULE,
        title=f"{_who(row)} ran out of memory{also}: {_why(row, grown)}",
        severity=Severity.INFO,
        evidence=tuple(_evidence(row, held)),
        action=let_go(grown) if grown is not None else _action(job, row, held),
        confidence=Confidence.HIGH,
        obtained=Obtained.MEASURED,
    )


def _who(row: OutOfMemoryRow) -> str:
    return f"Rank {row.rank}" if row.rank is not None else f"Device {row.device}"


def _grown(job: RuleContext, row: OutOfMemoryRow) -> GrowthRow | None:
    """What grew until it filled a good part of the device."""
    rows = job.summary.snapshots.growth if job.summary.snapshots is not None else ()
    mine = [each for each in rows if (each.rank, each.device) == (row.rank, row.device)]
    return next((each for each in mine if each.last_bytes >= GROWN * row.allocated_bytes), None)


def _why(row: OutOfMemoryRow, grown: GrowthRow | None) -> str:
    if grown is not None:
        return f"{byte_size(grown.bytes_per_step)} more are kept in each step, in {grown.where}"
    asked, beside = byte_size(row.requested_bytes), byte_size(row.allocated_bytes)
    idle = byte_size(row.reserved_bytes - row.allocated_bytes)
    return {
        "fragmentation": f"{asked} did not fit into any of the free pieces, although {idle} of what the allocator held "
        "were not in use",
        "others": f"{asked} more did not fit beside {beside}; something else on the device takes more than a quarter "
        "of it",
        "request": f"one allocation of {asked} is more than half of the device",
        "full": f"{asked} more did not fit beside {beside} of tensors",
    }[row.cause]


def _held(job: RuleContext, row: OutOfMemoryRow) -> list[HolderRow]:
    snapshots = job.summary.snapshots
    rows = snapshots.holders if snapshots is not None else ()
    return [each for each in rows if (each.rank, each.device) == (row.rank, row.device)]


def _evidence(row: OutOfMemoryRow, held: list[HolderRow]) -> list[Evidence]:
    ranks = () if row.rank is None else (row.rank,)
    return [
        Evidence(f"asked for by {row.where}", row.requested_bytes, "bytes", ranks),
        Evidence("allocated then", row.allocated_bytes, "bytes", ranks),
        Evidence("held by the allocator then", row.reserved_bytes, "bytes", ranks),
        Evidence("free on the device then", row.device_free_bytes, "bytes", ranks),
        *(Evidence(f"at the peak, {each.where}", each.bytes, "bytes", ranks) for each in held[:3]),
    ]


def _action(job: RuleContext, row: OutOfMemoryRow, held: list[HolderRow]) -> Action:
    expandable = _is_expandable(job, row)
    if row.cause == "fragmentation" and not expandable:
        return Action(setting=EXPANDABLE, old=None, new="expandable_segments:True", how=SET_EXPANDABLE)
    if row.cause == "others":
        tools = "amd-smi process or rocm-smi --showpids" if job.on_amd else "nvidia-smi, rocm-smi"
        return Action(
            setting="", old=None, new=None,
            how=f"Look who else uses the device ({tools}): other processes, several ranks on one device, "
            "the buffers of communicators, or libraries that allocate without torch.",
        )  # fmt: skip
    if row.cause == "request":
        return Action(
            setting=row.call, old=None, new=None,
            how=f"Do it in pieces: that allocation, by {row.where}, must become several. Or {_SMALLER}.",
        )  # fmt: skip
    return _of_phase(job, held)


def _is_expandable(job: RuleContext, row: OutOfMemoryRow) -> bool:
    snapshots = job.summary.snapshots
    rows = snapshots.devices if snapshots is not None else ()
    return any(each.expandable for each in rows if (each.rank, each.device) == (row.rank, row.device))


def _of_phase(job: RuleContext, held: list[HolderRow]) -> Action:
    """What frees most of the phase that holds most."""
    shares: dict[str, float] = {}
    for each in held:
        shares[each.phase] = shares.get(each.phase, 0.0) + each.share
    phase = max(shares, key=lambda name: shares[name], default="")
    most = f"{phase} holds {percent(shares[phase])} at the peak" if shares else ""
    if phase == "forward":
        return Action(setting="activation checkpointing", old=None, new=None, how=_CHECKPOINTING, costs=(
            "About a third more computation: one more forward of the blocks."))  # fmt: skip
    if phase in ("setup", "optimizer", "before") and (job.info.world_size or 1) > 1:
        how = f"Shard what every rank holds ({most}). In place of DistributedDataParallel. "
        return Action(setting="sharding", old=None, new=None, how=how + fsdp2(reshard_after_forward=True))
    return Action(
        setting="memory of the step", old=None, new=None,
        how=f"Look at the largest holders at the peak{f' ({most})' if most else ''}. Use {_SMALLER}, optimizer states "
        "in fewer bits or on the host, or parameters in 16 bits.",
    )  # fmt: skip
