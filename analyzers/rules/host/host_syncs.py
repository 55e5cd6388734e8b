"""Host synchronization: fires when the host waits for the device in every step, and the device then for the host.

``.item()``, tensors whose size depends on values (``nonzero``, boolean masks) and ``synchronize()`` block the host
until the device is done; nothing is queued by then, and the device becomes idle. Little idle time may follow the waits
themselves, and much may follow from them: a host that waits in every step cannot run ahead, so its pauses, its loader
and the ranks that are late keep devices waiting in steps to come. There the replay without the waits tells. The finding
names what the trace shows: the runtime call, the operator that made it, the range around it. One rank alone that blocks
is a straggler.
Waits for FSDP's limit on gathered units are not the script's. What the loop reads after collectives of its own goes
with these, which have a rule.
Source: PyTorch performance tuning guide, "Avoid unnecessary CPU-GPU synchronization".
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.job.tables.syncs import SyncRow
from perfscope.analyzers.rank.host_activity import LIMIT
from perfscope.analyzers.rules.communication import loop_collectives
from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.cpu_optimizer import on_cpu_us
from perfscope.analyzers.rules.host.debug_settings import launches_block
from perfscope.analyzers.rules.memory.pinned_memory import blocking_copies
from perfscope.analyzers.rules.typed import call, in_deepspeed, training_arguments
from perfscope.frozen import dataclass
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code

RULE: Final = "host-syncs"
_NO_BREAKDOWN: Final = '{"wall_clock_breakdown": false}'
_CHANGE: Final = {"host.sync": "0"}
SHARE: Final = 0.04
"""Least share of the step in which devices are idle; a loss printed at a step's end costs less."""
NAMED: Final = 4
"""Places listed as evidence."""


@dataclass(frozen=True)
class _Kind:
    """A way to synchronize."""

    setting: str
    how: str


_SCALAR: Final = _Kind(
    ".item() in the step",
    ".item(), float(), int(), bool(), print() or an if on a tensor of the device waits for it. Leave the value there "
    "(total += loss.detach()) and read it every 50 steps, or after the next step has been launched.",
)
_SIZED_BY_VALUES: Final = _Kind(
    "{operator} in the step",
    "The size of its result depends on values, so the host has to wait for them. Use operations of fixed size: "
    "torch.where or a multiplication by the mask instead of x[mask], nonzero or unique; pass output_size to "
    "repeat_interleave.",
)
_COPY: Final = _Kind(
    "copies to the host in the step",
    "A copy between host and device blocks: .cpu(), .tolist(), .numpy(), or .to(device) from memory that is not "
    "pinned. Copy with non_blocking=True into pinned memory and read the result a step later.",
)
_READ: Final = _Kind(
    "copies to the host in the step",
    "A copy between host and device blocks: .item(), .cpu(), .tolist(), .numpy(), or .to(device) from memory that is "
    "not pinned. Read values every 50 steps, or copy with non_blocking=True into pinned memory and read the result a "
    "step later. Recorded operators (ProfilerActivity.CPU; perfscope run does) show which it is.",
)
_EXPLICIT: Final = _Kind(
    "synchronize() in the step",
    "torch.cuda.synchronize(), Stream.synchronize() or Event.synchronize() in the script or its framework (timers do "
    "that): remove it, or measure with events that are read a few steps later.",
)
_FREED: Final = _Kind(
    "memory freed in the step",
    "Freeing device memory waits for the whole device: torch.cuda.empty_cache() in the loop, or PyTorch's allocator, "
    'which frees what it has cached when memory runs out (torch.cuda.memory_stats()["num_alloc_retries"]). Remove the '
    "call, or use less memory; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True fragments it less.",
)
_KINDS: Final = {
    **dict.fromkeys(("_local_scalar_dense", "item", "is_nonzero", "equal"), _SCALAR),
    **dict.fromkeys(
        ("nonzero", "masked_select", "index", "index_put_", "_index_put_impl_", "unique", "_unique2",
         "unique_consecutive", "unique_dim", "repeat_interleave", "bincount"),
        _SIZED_BY_VALUES,
    ),
    **dict.fromkeys(("copy_", "_to_copy", "to"), _COPY),
}  # fmt: skip
"""ATen operator -> how it synchronizes; of all other calls those that do not copy are explicit."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: little idle time after synchronizations, or launches that are set to block."""
    copies = sum(row.idle_us for row in blocking_copies(job))
    if launches_block(job):
        return None
    of_loop = loop_collectives.evaluate(job) if loop_collectives.reads_us(job) else None
    others = tuple(row for row in job.syncs if row.inside == LIMIT or (row.of_loop and of_loop is not None))
    idle = job.typical_us("idle_sync") - copies - sum(row.idle_us for row in others)
    computing = on_cpu_us(job)  # an optimizer on the CPU needs what it waits for
    if computing and idle - computing < SHARE * job.step_time_us:
        return None
    rows = tuple(row for row in job.syncs if row not in blocking_copies(job) and row not in others)
    if idle < SHARE * job.step_time_us:
        return None if copies or of_loop is not None else _cannot_run_ahead(job, rows)
    note = job.median_note("idle_sync")
    longest = f", most of it in {_place(rows[0])}" if rows else ""
    return job.finding(
        RULE,
        f"Host synchronization leaves the devices idle for {job.share(idle):.0%} of the step{note}{longest}",
        idle,
        evidence=(
            Evidence("device idle after host synchronization (median)", idle, "us", job.ranks),
            *(_evidence(row) for row in rows[:NAMED]),
        ),
        action=_action(job, rows),
        confidence=_confidence(job),
        # The copies' share of the idle time is another rule's, and cannot be replayed apart.
        whatif={} if copies else _CHANGE if of_loop is None else _but_of_loop(job),
    )


def _but_of_loop(job: RuleContext) -> dict[str, str]:
    """The change that leaves the reads of what collectives of the loop bring, which go with these."""
    left = loop_collectives.reads_us(job) / sum(row.idle_us for row in job.syncs)
    return {**_CHANGE, "host.sync": f"{left:.2f}"}


def _cannot_run_ahead(job: RuleContext, rows: tuple[SyncRow, ...]) -> Finding | None:
    """The finding where most ranks wait, and the replay without the waits is so much shorter, also than without the
    hosts' pauses and without the time in which devices wait for batches, which have findings of their own; else None.
    A lone step shows nothing that a host could run ahead of.
    """
    waiting = {rank for row in rows for rank in row.ranks}
    if len(job.info.steps) < 2 or 2 * len(waiting) <= len(job.ranks):
        return None
    step = job.replayed(_CHANGE, SHARE)
    if step is None:
        return None
    prediction, saved = step
    others = [job.typical_us("idle_dataloader")]
    if (unpaused := job.replayed({"host.pauses": "0"}, 0.0)) is not None:
        others.append(unpaused[1])
    if saved - max(others) < SHARE * job.step_time_us:
        return None
    return job.finding(
        RULE,
        f"Hosts that wait for their devices cannot run ahead: a step takes {job.share(saved):.0%} less without these "
        f"waits, most of them in {_place(rows[0])}",
        saved,
        evidence=(
            Evidence("step without waits of hosts for devices, replayed", prediction.mid, "us", job.ranks),
            *(_evidence(row, "device idle right after the wait in") for row in rows[:NAMED]),
        ),
        action=_action(job, rows),
        confidence=Confidence.LOW if _confidence(job) is Confidence.LOW else Confidence.MEDIUM,
        predicted=prediction,
        whatif=_CHANGE,
    )


def _action(job: RuleContext, rows: tuple[SyncRow, ...]) -> Action:
    setting = _kind(rows[0]).setting.format(operator=_operator(rows[0])) if rows else "synchronizing calls"
    return Action(setting=setting, old=None, new=None, how=_how(job, rows))


def _confidence(job: RuleContext) -> Confidence:
    """High only where all ranks are recorded: how long the others synchronize is not known otherwise."""
    if job.info.few_steps:
        return Confidence.LOW
    return Confidence.MEDIUM if job.info.missing_ranks else Confidence.HIGH


def _place(row: SyncRow) -> str:
    """``aten::_local_scalar_dense in Optimizer.step#Adam.step``."""
    what = row.operator or row.call
    return f"{what} in {row.inside}" if row.inside else what


def _evidence(row: SyncRow, of: str = "of that in") -> Evidence:
    return Evidence(f"{of} {_place(row)} ({row.call}, {row.count_per_step:.3g} times)", row.idle_us, "us", row.ranks)


def _operator(row: SyncRow) -> str:
    return row.operator.removeprefix("aten::")


def _kind(row: SyncRow) -> _Kind:
    if row.call.endswith("Free") or row.call.startswith("cuMemFree"):
        return _FREED
    return _KINDS.get(_operator(row), _READ if "memcpy" in row.call.lower() else _EXPLICIT)


def _how(job: RuleContext, rows: tuple[SyncRow, ...]) -> str:
    """What to do at the places that cost the most, and settings of the framework that are known to block."""
    kinds: dict[_Kind, SyncRow] = {}
    for row in rows:
        if row.idle_us >= 0.2 * rows[0].idle_us:
            kinds.setdefault(_kind(row), row)
    lines = [f"{_place(row)}: {kind.how}" for kind, row in kinds.items()] or [_EXPLICIT.how]
    switch = {
        "transformers": "Without a check of every step's loss:\n"
        + training_arguments(logging_nan_inf_filter=False, logging_steps=50),
        "lightning": "The progress bar reads each value logged to it:\n"
        + call("trainer = Trainer", log_every_n_steps=50, enable_progress_bar=False),
        "megatron": code("shell", "--timing-log-level 0 --no-check-for-nan-in-loss-and-grad --log-interval 100"),
    }.get(job.framework)
    if job.deepspeed_config.get("wall_clock_breakdown"):
        switch = f"DeepSpeed's timers synchronize around every phase. {in_deepspeed(_NO_BREAKDOWN)}"
    return "\n".join([*lines, *([switch] if switch else [])])
