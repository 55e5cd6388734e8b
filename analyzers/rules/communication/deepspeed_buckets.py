"""DeepSpeed's communication: fires when its ZeRO engine waits for reductions or gathers that could overlap compute, or
moves them in pieces so small that latency dominates.

Sizes in the JSON count elements, not bytes. Defaults (DeepSpeed ``config-json.md``): ``overlap_comm`` false but at
stage 3, ``reduce_bucket_size`` and ``allgather_bucket_size`` 5e8, ``stage3_prefetch_bucket_size`` 5e7,
``stage3_param_persistence_threshold`` 1e5.
"""

from __future__ import annotations

from dataclasses import field
from math import ceil
from typing import Any, Final

from perfscope.analyzers.rules.communication.traffic import CollectiveTraffic, traffic
from perfscope.analyzers.rules.context import RuleContext, known
from perfscope.analyzers.rules.typed import in_deepspeed
from perfscope.frozen import dataclass
from perfscope.recording.vocabulary import REDUCE
from perfscope.results.findings import Action, Confidence, Evidence, Finding, Prediction
from perfscope.text import byte_size

RULE: Final = "deepspeed-communication"
SHARE: Final = 0.05
"""Share of the step that must be saved."""
LATENCY: Final = 0.5
"""Collectives are too small when their latency is at least this share of their transfer time; on CPUs, too, when as
much of what the engine's code for them takes does not grow with their bytes.
"""
TIMES: Final = 4
"""How many times as large the advised bucket is at least: a quarter of the collectives. It is larger where moving so
much still takes less than this many latencies.
"""


@dataclass(frozen=True)
class _ZeroSetting:
    """A new value in the JSON's ``zero_optimization``, what it saves per step, and the problem that it solves."""

    key: str
    new: str
    problem: str
    costs: str
    saved_us: float
    traffic: CollectiveTraffic
    prediction: Prediction | None = None
    whatif: dict[str, str] = field(default_factory=dict)


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no DeepSpeed, overlapped communication, or no setting that would help."""
    zero: dict[str, Any] = job.settings("deepspeed").get("zero_optimization") or {}
    if not zero or job.steps == 0 or job.exposed_transfer_us < SHARE * job.step_time_us:
        return None
    gather_key = "stage3_param_persistence_threshold" if zero.get("stage") == 3 else "allgather_bucket_size"
    changes = (
        _overlap(job, zero),
        _prefetch(job, zero),
        _larger(job, zero, "reduce_bucket_size", "reduce_scatter", "all_reduce", "reduce"),
        _larger(job, zero, gather_key, "all_gather", "broadcast"),
    )
    best = max(filter(None, changes), key=lambda change: change.saved_us, default=None)
    if best is None:
        return None
    old, moved = zero.get(best.key), best.traffic
    return job.finding(
        RULE,
        f"{best.problem}: {job.exposed_share:.0%} of the step is exposed transfer",
        best.saved_us,
        evidence=(
            job.exposed_transfer(),
            Evidence(f"{moved.kind} per step", moved.count, ranks=moved.ranks),
            Evidence(f"bytes of {moved.kind} per step", moved.bytes, "bytes", moved.ranks),
            *known(f"latency as a share of the {moved.kind} time", moved.latency_share, "share"),
        ),
        action=Action(
            setting=f'"{best.key}"',
            old=None if old is None else _json(old),
            new=best.new,
            how=in_deepspeed(f'{{"zero_optimization": {{"{best.key}": {best.new}}}}}'),
            costs=best.costs,
        ),
        confidence=job.confidence() if best.prediction is not None else Confidence.LOW,
        predicted=best.prediction,
        whatif=best.whatif,
    )


def _overlap(job: RuleContext, zero: dict[str, Any]) -> _ZeroSetting | None:
    """Reductions that overlap the backward."""
    reductions = traffic(job, "reduce_scatter", "all_reduce", "reduce")
    if zero.get("overlap_comm") is not False or reductions is None:
        return None
    whatif = {"zero.overlap_comm": "true"}
    replayed = job.replayed(whatif, SHARE)
    if replayed is None:
        return None
    return _ZeroSetting(
        key="overlap_comm", new="true", problem="Gradients are reduced while the backward waits",
        costs=f"Two buckets in flight: up to {byte_size(2 * reductions.largest)} more memory per rank.",
        saved_us=replayed[1], traffic=reductions, prediction=replayed[0], whatif=whatif,
    )  # fmt: skip


def _prefetch(job: RuleContext, zero: dict[str, Any]) -> _ZeroSetting | None:
    """Parameters gathered one module earlier."""
    gathers = traffic(job, "all_gather")
    size = zero.get("stage3_prefetch_bucket_size")
    if zero.get("stage") != 3 or gathers is None or not job.on_devices or not isinstance(size, int | float):
        return None
    whatif = {"fsdp.prefetch": "1"}
    replayed = job.replayed(whatif, SHARE)
    needed = 2 * gathers.largest // gathers.element_bytes
    if replayed is None or size >= needed:
        return None
    return _ZeroSetting(
        key="stage3_prefetch_bucket_size", new=str(needed), problem="Modules wait for parameters gathered too late",
        costs=f"Up to {byte_size(gathers.largest)} more memory per rank.",
        saved_us=replayed[1], traffic=gathers, prediction=replayed[0], whatif=whatif,
    )  # fmt: skip


def _larger(job: RuleContext, zero: dict[str, Any], key: str, *kinds: str) -> _ZeroSetting | None:
    """Fewer, larger collectives: at most their latency is saved."""
    moved = traffic(job, *kinds)
    old = zero.get(key)
    if moved is None or not isinstance(old, int | float):
        return None
    reducing_us = _reducing_us(job) if key == "reduce_bucket_size" else 0.0
    fixed = 1 - moved.bytes * moved.us_per_byte / reducing_us if reducing_us else 0.0
    if max(moved.latency_share or 0.0, fixed) < LATENCY:
        return None
    times = _times(moved)
    saved_us = min(moved.count * (moved.alpha_us or 0.0) * (1 - 1 / times), job.exposed_transfer_us)
    saved_us = max(saved_us, reducing_us)
    if saved_us < SHARE * job.step_time_us:
        return None
    mean = moved.bytes / moved.count
    if key == "stage3_param_persistence_threshold":
        # Parameters up to the usual size stay on every rank and are not gathered at all.
        new = int(mean / moved.element_bytes) + 1
        stay = byte_size(moved.bytes / (2 * job.microbatches))
        costs = f"Smaller parameters stay on every rank: up to {stay} more memory."
        if new <= old:
            return None
    elif old * moved.element_bytes > TIMES * mean:
        return None  # the bucket does not limit their size
    else:
        # A parameter larger than the bucket is reduced by itself.
        new = _rounded_up(times * max(old, mean / moved.element_bytes))
        costs = f"A bucket of {byte_size(new * moved.element_bytes)} per rank."
    what = "gradients" if key == "reduce_bucket_size" else "parameters"
    return _ZeroSetting(
        key=key, new=str(new), problem=f"DeepSpeed moves {what} in pieces that are too small", costs=costs,
        saved_us=saved_us, traffic=moved,
    )  # fmt: skip


def _reducing_us(job: RuleContext) -> float:
    """What DeepSpeed's own code for the reductions takes of a step on CPUs; 0 where it was not recorded.

    0 on devices, too, where the host may do it ahead of them. Moving the bytes is in it: on CPUs that is little, and
    threads that do it take cores from the training.
    """
    if job.on_devices:
        return 0.0
    return max((row.host_us_per_step for row in job.summary.modules if row.name == REDUCE), default=0.0)


def _times(moved: CollectiveTraffic) -> int:
    """How many times as large pieces need to be, so that latency is a fifth of their time: up to all in one."""
    mean = moved.bytes / moved.count
    wanted = TIMES * (moved.alpha_us or 0.0) / moved.us_per_byte if moved.us_per_byte > 0 else moved.bytes
    return max(TIMES, ceil(min(wanted, moved.bytes) / mean))


def _rounded_up(elements: float) -> int:
    """To two digits: with a little less than all of them, what is left over is sent by itself."""
    unit: int = 10 ** max(len(str(ceil(elements))) - 2, 0)
    return ceil(elements / unit) * unit


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
