"""DeepSpeed's communication: fires when its ZeRO engine waits for reductions or gathers that could run meanwhile, or
moves them in pieces so small that starting them is what takes time.

Sizes in the JSON count elements, not bytes. Defaults (DeepSpeed ``config-json.md``): ``overlap_comm`` false but at
stage 3, ``reduce_bucket_size`` and ``allgather_bucket_size`` 5e8, ``stage3_prefetch_bucket_size`` 5e7,
``stage3_param_persistence_threshold`` 1e5.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.frameworks import settings_of
from perfscope.analyzers.rules.traffic import Traffic, gib, on_devices, replayed, sure, traffic
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Prediction, Severity, ceiling

RULE: Final = "deepspeed-communication"
SHARE: Final = 0.05
"""Share of the step that must be saved."""
LATENCY: Final = 0.5
"""Share of a kind's transfer time that is starting its collectives from which they are too small."""
TIMES: Final = 4
"""How many times as large a bucket is advised: a quarter of the starts."""
_BYTES: Final = {"float32": 4, "float64": 8}
"""Of an element; 2 for all others."""


@dataclass(frozen=True)
class _Change:
    """One value of the JSON's ``zero_optimization`` to change."""

    key: str
    new: str
    why: str
    costs: str
    saved_us: float
    traffic: Traffic
    prediction: Prediction | None = None
    whatif: dict[str, str] = field(default_factory=dict)


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: no DeepSpeed, communication that hides, or nothing that its settings would change."""
    zero: dict[str, Any] = settings_of(facts, "deepspeed").get("zero_optimization") or {}
    exposed_us = facts.typical_us("exposed_comm_transfer")
    if not zero or facts.steps == 0 or exposed_us < SHARE * facts.step_time_us:
        return None
    changes = [
        change
        for change in (
            _overlap(facts, zero),
            _prefetch(facts, zero),
            _larger(facts, zero, exposed_us, "reduce_bucket_size", "reduce_scatter", "all_reduce", "reduce"),
            _larger(facts, zero, exposed_us, _gather_key(zero), "all_gather", "broadcast"),
        )
        if change is not None
    ]
    if not changes:
        return None
    best = max(changes, key=lambda change: change.saved_us)
    old = zero.get(best.key)
    return Finding(
        rule=RULE,
        title=f"{best.why}: {exposed_us / facts.step_time_us:.0%} of the step is exposed transfer",
        severity=Severity.of_share(best.saved_us / facts.step_time_us),
        evidence=_evidence(facts, best, exposed_us),
        action=Action(
            setting=f'"{best.key}"',
            old=None if old is None else _json(old),
            new=best.new,
            how=f'"zero_optimization": {{"{best.key}": {best.new}}} in the DeepSpeed JSON.',
            costs=best.costs,
        ),
        confidence=sure(facts) if best.prediction is not None else Confidence.LOW,
        obtained=Obtained.REPLAYED if best.prediction is not None else Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, best.saved_us),
        predicted_step_ns=best.prediction,
        whatif=best.whatif,
    )


def _overlap(facts: JobFacts, zero: dict[str, Any]) -> _Change | None:
    """Reductions beside the backward."""
    reductions = traffic(facts, "reduce_scatter", "all_reduce", "reduce")
    if zero.get("overlap_comm") is not False or reductions is None:
        return None
    whatif = {"zero.overlap_comm": "true"}
    found = replayed(facts, whatif, SHARE)
    if found is None:
        return None
    return _Change(
        key="overlap_comm", new="true", why="Gradients are reduced while the backward stands still",
        costs=f"Two buckets in flight: up to {gib(2 * reductions.largest)} more memory on each rank.",
        saved_us=found[1], traffic=reductions, prediction=found[0], whatif=whatif,
    )  # fmt: skip


def _prefetch(facts: JobFacts, zero: dict[str, Any]) -> _Change | None:
    """Parameters gathered one module earlier."""
    gathers = traffic(facts, "all_gather")
    size = zero.get("stage3_prefetch_bucket_size")
    if zero.get("stage") != 3 or gathers is None or not on_devices(facts) or not isinstance(size, int | float):
        return None
    whatif = {"fsdp.prefetch": "1"}
    found = replayed(facts, whatif, SHARE)
    needed = 2 * gathers.largest // _element(gathers)
    if found is None or size >= needed:
        return None
    return _Change(
        key="stage3_prefetch_bucket_size", new=str(needed), why="Modules wait for parameters gathered too late",
        costs=f"Up to {gib(gathers.largest)} more memory on each rank.",
        saved_us=found[1], traffic=gathers, prediction=found[0], whatif=whatif,
    )  # fmt: skip


def _gather_key(zero: dict[str, Any]) -> str:
    return "stage3_param_persistence_threshold" if zero.get("stage") == 3 else "allgather_bucket_size"


def _larger(facts: JobFacts, zero: dict[str, Any], exposed_us: float, key: str, *kinds: str) -> _Change | None:
    """Fewer, larger collectives: starting them is a bound of what that saves."""
    moved = traffic(facts, *kinds)
    old = zero.get(key)
    if (
        moved is None
        or moved.latency_share is None
        or moved.latency_share < LATENCY
        or not isinstance(old, int | float)
    ):
        return None
    saved_us = min(moved.count * (moved.alpha_us or 0.0) * (1 - 1 / TIMES), exposed_us)
    if saved_us < SHARE * facts.step_time_us:
        return None
    mean = moved.bytes / moved.count
    if key == "stage3_param_persistence_threshold":
        # Parameters up to the usual size stay on every rank and are not gathered at all.
        new = int(mean / _element(moved)) + 1
        costs = f"Parameters below that stay on every rank: up to {gib(moved.bytes / 2)} more memory."
        if new <= old:
            return None
    elif old * _element(moved) > TIMES * mean:
        return None  # the bucket is not what keeps them small
    else:
        new = int(TIMES * old)
        costs = f"A bucket of {gib(new * _element(moved))} on each rank."
    what = "gradients" if key == "reduce_bucket_size" else "parameters"
    return _Change(
        key=key, new=str(new), why=f"DeepSpeed moves {what} in pieces too small", costs=costs, saved_us=saved_us,
        traffic=moved,
    )  # fmt: skip


def _element(moved: Traffic) -> int:
    return _BYTES.get(moved.dtype or "", 2)


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _evidence(facts: JobFacts, change: _Change, exposed_us: float) -> tuple[Evidence, ...]:
    moved = change.traffic
    rows = [
        Evidence(what="exposed communication transfer per step", value=exposed_us, unit="us", ranks=facts.ranks),
        Evidence(what=f"{moved.kind} per step", value=moved.count, unit="", ranks=moved.ranks),
        Evidence(what=f"bytes of {moved.kind} per step", value=moved.bytes, unit="bytes", ranks=moved.ranks),
    ]
    if moved.latency_share is not None:
        rows.append(Evidence(what=f"share of its time that is starting {moved.kind}", value=moved.latency_share,
                             unit="share"))  # fmt: skip
    return tuple(rows)
