"""Host syncs: fires when the host waits for the device in every step and the device then waits for the host.

``.item()``, tensors whose size depends on values (``nonzero``, boolean masks) and ``synchronize()`` block the host
until the device has caught up; nothing is queued by then, and the device runs dry. Named is what the trace tells: the
runtime call, the operator that made it, the range around it. One rank alone that blocks is a straggler.
Source: PyTorch performance tuning guide, "Avoid unnecessary CPU-GPU synchronization".
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.debug_settings import launches_block
from perfscope.analyzers.rules.frameworks import deepspeed_config, framework
from perfscope.analyzers.rules.pinned_memory import blocking_copies
from perfscope.analyzers.work.sync_table import SyncRow
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling

RULE: Final = "host-syncs"
SHARE: Final = 0.05
"""Share of the step in which devices run dry that fires the rule; a loss printed at a step's end costs less."""
NAMED: Final = 4
"""Places listed as evidence."""

_SCALAR: Final = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal")
_SIZED_BY_VALUES: Final = (
    "aten::nonzero", "aten::masked_select", "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::unique",
    "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim", "aten::repeat_interleave", "aten::bincount",
)  # fmt: skip
_COPIES: Final = ("aten::copy_", "aten::_to_copy", "aten::to")

_SCALAR_HOW: Final = (
    ".item(), float(), int(), bool(), print() or an if on a tensor of the device waits for it. Keep the value there "
    "(total += loss.detach()) and read it every 50 steps, or after the next step has been launched."
)
_SIZED_HOW: Final = (
    "Its result's size depends on values, so the host has to wait for them. Use operations of fixed size: torch.where "
    "or a multiplication by the mask in the place of x[mask], nonzero or unique; give repeat_interleave its "
    "output_size."
)
_COPY_HOW: Final = (
    "A copy between host and device that blocks: .cpu(), .tolist(), .numpy(), or .to(device) of memory that is not "
    "pinned. Copy with non_blocking=True into pinned memory and read the result a step later."
)
_OWN_HOW: Final = (
    "torch.cuda.synchronize(), Stream.synchronize() or Event.synchronize() in the script or its framework (timers do "
    "that): take it out, or time with events that are read a few steps later."
)


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: little idle time behind syncs, or launches that were told to block."""
    copies = sum(row.idle_us for row in blocking_copies(facts))
    idle = facts.typical_us("idle_sync") - copies
    if idle < SHARE * facts.step_time_us or launches_block(facts):
        return None
    rows = tuple(row for row in facts.syncs if row not in blocking_copies(facts))
    share = idle / facts.step_time_us
    return Finding(
        rule=RULE,
        title=f"Host synchronisation runs the devices dry for {share:.0%} of the step{_by(rows)}",
        severity=Severity.of_share(share),
        evidence=(
            Evidence(what="device idle behind syncs (median)", value=idle, unit="us", ranks=facts.ranks),
            *(_evidence(row) for row in rows[:NAMED]),
        ),
        action=Action(setting=_setting(rows), old=None, new=None, how=_how(facts, rows)),
        confidence=Confidence.LOW if facts.few_steps else Confidence.HIGH,
        obtained=Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, idle),
        # The copies' share of the idle time is another rule's, and cannot be played apart.
        whatif={} if copies else {"host.sync": "0"},
    )


def _by(rows: tuple[SyncRow, ...]) -> str:
    return f", most of it in {_place(rows[0])}" if rows else ""


def _setting(rows: tuple[SyncRow, ...]) -> str:
    if not rows:
        return "synchronising calls"
    kind = _kind(rows[0])
    return {
        _SCALAR_HOW: ".item() in the step",
        _SIZED_HOW: f"{rows[0].operator.removeprefix('aten::')} in the step",
        _COPY_HOW: "copies to the host in the step",
        _OWN_HOW: "synchronize() in the step",
    }[kind]


def _place(row: SyncRow) -> str:
    """``aten::_local_scalar_dense in Optimizer.step#Adam.step``."""
    what = row.operator or row.call
    return f"{what} in {row.inside}" if row.inside else what


def _evidence(row: SyncRow) -> Evidence:
    return Evidence(
        what=f"of it in {_place(row)} ({row.call}, {row.count_per_step:.3g} times)",
        value=row.idle_us,
        unit="us",
        ranks=row.ranks,
    )


def _kind(row: SyncRow) -> str:
    if row.operator in _SCALAR:
        return _SCALAR_HOW
    if row.operator in _SIZED_BY_VALUES:
        return _SIZED_HOW
    return _COPY_HOW if row.operator in _COPIES else _OWN_HOW


def _how(facts: JobFacts, rows: tuple[SyncRow, ...]) -> str:
    """What to do about the places that cost the most, and the switches of the framework that are known to block."""
    worth = [row for row in rows if row.idle_us >= 0.2 * rows[0].idle_us] if rows else []
    lines = [f"{_place(row)}: {_kind(row)}" for row in _first_of_each_kind(worth)] or [_OWN_HOW]
    switch = {
        "transformers": "--logging_nan_inf_filter False spares a look at every step's loss; --logging_steps 50.",
        "lightning": "Trainer(log_every_n_steps=50, enable_progress_bar=False): the progress bar reads each value "
        "logged to it.",
        "megatron": "--timing-log-level 0, --no-check-for-nan-in-loss-and-grad and a larger --log-interval.",
    }.get(framework(facts))
    if deepspeed_config(facts).get("wall_clock_breakdown"):
        switch = '"wall_clock_breakdown": false in the DeepSpeed JSON: its timers synchronise around every phase.'
    return "\n".join([*lines, *([switch] if switch else [])])


def _first_of_each_kind(rows: list[SyncRow]) -> list[SyncRow]:
    kinds: dict[str, SyncRow] = {}
    for row in rows:
        kinds.setdefault(_kind(row), row)
    return list(kinds.values())
