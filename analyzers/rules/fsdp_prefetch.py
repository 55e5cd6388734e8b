"""FSDP's gathers: fires when layers wait for parameters that could have been gathered while the layer before computed,
or when units are so small or so large that gathering them cannot hide.

FSDP1 hands the next backward's gather over early with ``backward_prefetch=BACKWARD_PRE``, the next forward's with
``forward_prefetch=True`` (torch ``docs/source/notes/fsdp.rst``); FSDP2 does so by itself where the host runs ahead, and
on request (``set_modules_to_forward_prefetch``). What is gathered at once is what was wrapped: one unit for everything
computes nothing meanwhile, units of single layers pay the start of a collective each.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.frameworks import framework, settings_of
from perfscope.analyzers.rules.traffic import MIB, Traffic, gib, on_devices, replayed, sure, traffic
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling

RULE: Final = "fsdp-gathers"
SHARE: Final = 0.05
"""Share of the step of exposed transfer from which gathers are looked at, and that must be saved."""
HUGE: Final = 0.4
"""Share of the parameters in one gather from which the unit is too large."""
LATENCY: Final = 0.5
"""Share of the gathers' time that is starting them from which units are too small."""
FEW: Final = 8
"""Gathers a step from which they can be many."""


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: no FSDP, hidden gathers, or nothing that would hide them."""
    gathers = traffic(facts, "all_gather")
    if "fsdp" not in facts.strategies or gathers is None or _is_megatron(facts):
        return None
    exposed_us = facts.typical_us("exposed_comm_transfer")
    if exposed_us < SHARE * facts.step_time_us:
        return None
    return _units(facts, gathers, exposed_us) or _prefetched(facts, gathers, exposed_us)


def _is_megatron(facts: JobFacts) -> bool:
    return bool(settings_of(facts, "megatron"))


def _prefetched(facts: JobFacts, gathers: Traffic, exposed_us: float) -> Finding | None:
    """Gathers handed over one earlier, by replay. On CPUs the threads that gather compete with those that compute."""
    if not on_devices(facts):
        return None
    change = {"fsdp.prefetch": "1"}
    found = replayed(facts, change, SHARE)
    if found is None:
        return None
    prediction, saved_us = found
    setting, old, new, how = _prefetch_setting(facts)
    return Finding(
        rule=RULE,
        title="Layers wait for parameters that could be gathered while the layer before computes: "
        f"{exposed_us / facts.step_time_us:.0%} of the step is exposed transfer",
        severity=Severity.of_share(saved_us / facts.step_time_us),
        evidence=_evidence(facts, gathers, exposed_us),
        action=Action(
            setting=setting, old=old, new=new, how=how,
            costs=f"One more unit's parameters in memory at a time: {gib(gathers.largest)} at most.",
        ),
        confidence=sure(facts),
        obtained=Obtained.REPLAYED,
        ceiling=ceiling(facts.step_time_us, saved_us),
        predicted_step_ns=prediction,
        whatif=change,
    )  # fmt: skip


def _prefetch_setting(facts: JobFacts) -> tuple[str, str | None, str, str]:
    """What is still off, as the FSDP in use writes it."""
    fsdp = settings_of(facts, "fsdp")
    in_file = framework(facts) in ("accelerate", "transformers")
    if fsdp.get("version") == 1:
        if fsdp.get("backward_prefetch") != "BACKWARD_PRE":
            old = str(fsdp.get("backward_prefetch", "None"))
            how = (
                "fsdp_config: fsdp_backward_prefetch: BACKWARD_PRE in the file of accelerate config"
                if in_file
                else "FullyShardedDataParallel(model, …, backward_prefetch=BackwardPrefetch.BACKWARD_PRE)"
            )
            return "backward_prefetch", old, "BACKWARD_PRE", how
        how = (
            "fsdp_config: fsdp_forward_prefetch: true in the file of accelerate config"
            if in_file
            else "FullyShardedDataParallel(model, …, forward_prefetch=True)"
        )
        return "forward_prefetch", str(fsdp.get("forward_prefetch", False)), "True", how
    how = (
        "for each pair of consecutive blocks: block.set_modules_to_forward_prefetch([following]) and "
        "following.set_modules_to_backward_prefetch([block])"
    )
    return "FSDPModule.set_modules_to_forward_prefetch", "not used", "the following block", how


def _units(facts: JobFacts, gathers: Traffic, exposed_us: float) -> Finding | None:
    """Units of another size: a bound, as nothing tells how parameters fall into layers."""
    whole = gathers.bytes / 2
    latency = gathers.latency_share
    if gathers.largest >= HUGE * whole and gathers.count <= FEW:
        size = f"one gather brings {gathers.largest / whole:.0%} of the parameters"
        bound_us, new = exposed_us * gathers.largest / whole, "each block"
        how = _wrap(facts, "each transformer block (or layer of like size), then the whole model")
        costs = "None; memory for gathered parameters shrinks to two blocks."
    elif latency is not None and latency >= LATENCY and gathers.count > FEW:
        mean = gathers.bytes / gathers.count / MIB
        size = f"{gathers.count:.0f} gathers of {mean:.1f} MiB a step are mostly their start"
        bound_us, new = min(exposed_us, gathers.count * (gathers.alpha_us or 0.0) / 2), "larger units"
        how = _wrap(facts, "units twice as large: two blocks together, or blocks but not the layers inside them")
        costs = "Memory for gathered parameters grows with the unit."
    else:
        return None
    if bound_us < SHARE * facts.step_time_us:
        return None
    return Finding(
        rule=RULE,
        title=f"FSDP's units have the wrong size: {size}",
        severity=Severity.of_share(bound_us / facts.step_time_us),
        evidence=_evidence(facts, gathers, exposed_us),
        action=Action(setting="FSDP units", old=f"{gathers.count:.0f} gathers a step", new=new, how=how, costs=costs),
        confidence=Confidence.LOW,
        obtained=Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, bound_us),
    )


def _wrap(facts: JobFacts, what: str) -> str:
    if framework(facts) in ("accelerate", "transformers"):
        return (
            "fsdp_config: fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP with fsdp_transformer_layer_cls_to_wrap: the "
            f"class of {what}."
        )
    if settings_of(facts, "fsdp").get("version") == 1:
        policy = "functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})"
        return f"FullyShardedDataParallel(model, …, auto_wrap_policy={policy}): {what}."
    return f"fully_shard() on {what}."


def _evidence(facts: JobFacts, gathers: Traffic, exposed_us: float) -> tuple[Evidence, ...]:
    rows = [
        Evidence(what="exposed communication transfer per step", value=exposed_us, unit="us", ranks=facts.ranks),
        Evidence(what="gathers of parameters per step", value=gathers.count, unit="", ranks=gathers.ranks),
        Evidence(what="largest gather", value=gathers.largest, unit="bytes", ranks=gathers.ranks),
    ]
    if gathers.alpha_us is not None:
        rows.append(Evidence(what="fitted cost of starting one gather", value=gathers.alpha_us, unit="us"))
    return tuple(rows)
