"""FSDP's gathers: fires when layers wait for parameters that could be gathered while the previous layer computes, or
when units are so small or so large that gathering them stays exposed.

FSDP1 launches the next backward's gather early with ``backward_prefetch=BACKWARD_PRE``, the next forward's with
``forward_prefetch=True`` (torch ``docs/source/notes/fsdp.rst``); FSDP2 does so by itself where the host runs ahead, and
on request (``set_modules_to_forward_prefetch``). What is gathered at once is what was wrapped: one unit for everything
computes nothing meanwhile, units of single layers pay the start of a collective each.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.communication.traffic import CollectiveTraffic, traffic
from perfscope.analyzers.rules.context import RuleContext, known
from perfscope.analyzers.rules.typed import fsdp1, fsdp2, in_accelerate
from perfscope.results.findings import Action, Confidence, Evidence, Finding, Prediction, code
from perfscope.text import byte_size

RULE: Final = "fsdp-gathers"
SHARE: Final = 0.05
"""Least share of the step that is exposed transfer, and that must be saved."""
HUGE: Final = 0.4
"""A unit is too large when one gather holds at least this share of the parameters."""
LATENCY: Final = 0.5
"""Units are too small when latency is at least this share of the gathers' time."""
MORE: Final = 0.02
"""Share of the step that gathering ahead in the forward, too, must save beyond the backward's: less is noise."""
FEW: Final = 8
"""With more gathers per micro-batch than this they are many."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no FSDP, overlapped gathers, or nothing that would overlap them."""
    gathers = traffic(job, "all_gather")
    if "fsdp" not in job.info.strategies or job.settings("megatron"):
        return None
    if job.exposed_transfer_us < SHARE * job.step_time_us:
        return None
    return _prefetched(job, gathers) or (_units(job, gathers) if gathers is not None else None)


def _prefetched(job: RuleContext, gathers: CollectiveTraffic | None) -> Finding | None:
    """Gathers launched one layer earlier, replayed; ``gathers`` is None where their sizes are not recorded. On CPUs the
    threads that gather compete with those that compute.
    """
    if not job.on_devices:
        return None
    found = _best_change(job)
    if found is None:
        return None
    change, prediction, saved_us = found
    most = "" if gathers is None else f": at most {byte_size(gathers.largest)}"
    return job.finding(
        RULE,
        "Layers wait for parameters that could be gathered while the previous layer computes: "
        f"{job.exposed_share:.0%} of the step is exposed transfer",
        saved_us,
        evidence=(job.exposed_transfer(),) if gathers is None else _evidence(job, gathers),
        action=_prefetch_action(job, change, costs=f"Memory for the parameters of one more unit{most}."),
        confidence=job.confidence(),
        predicted=prediction,
        whatif=change,
    )


_PRE: Final = "BACKWARD_PRE"
_BACKWARD: Final = {"fsdp.backward_prefetch": _PRE}
_ALL: Final = {"fsdp.prefetch": "1"}


def _best_change(job: RuleContext) -> tuple[dict[str, str], Prediction, float] | None:
    """(what to change, the step with it, the µs that it saves): the gathers of backwards alone, unless those of
    forwards save more.
    """
    backward, both = (job.replayed(change, SHARE) for change in (_BACKWARD, _ALL))
    if backward is not None and (both is None or both[1] - backward[1] < MORE * job.step_time_us):
        return _BACKWARD, *backward
    return None if both is None else (_ALL, *both)


def _prefetch_action(job: RuleContext, change: dict[str, str], costs: str) -> Action:
    """What is still off, as the FSDP in use writes it."""
    if job.fsdp_version == 1:
        return _arguments(job, change, costs)
    calls = ["following.set_modules_to_backward_prefetch([block])"]
    if change == _ALL:
        calls.insert(0, "block.set_modules_to_forward_prefetch([following])")
    how = "For each pair of consecutive blocks, in the order in which they run:\n" + code(
        "python", "\n".join(("for block, following in zip(blocks, blocks[1:]):", *(f"    {each}" for each in calls)))
    )
    called, new = calls[0].split(".")[1].split("(")[0], "the following block" if change == _ALL else "the block before"
    return Action(setting=f"FSDPModule.{called}", old="not used", new=new, how=how, costs=costs)


def _arguments(job: RuleContext, change: dict[str, str], costs: str) -> Action:
    """FSDP1's."""
    fsdp = job.settings("fsdp")
    off = {"backward_prefetch": "BackwardPrefetch.BACKWARD_PRE"} if fsdp.get("backward_prefetch") != _PRE else {}
    if change == _ALL:
        off["forward_prefetch"] = "True"
    values = {"backward_prefetch": _PRE, "forward_prefetch": "true"}
    in_file = job.framework in ("accelerate", "transformers")
    how = (
        in_accelerate("\n".join(("fsdp_config:", *(f"  fsdp_{name}: {values[name]}" for name in off))))
        if in_file
        else fsdp1(*("BackwardPrefetch",) * ("backward_prefetch" in off), **off)
    )
    now = ", ".join(str(fsdp.get(name, False if name == "forward_prefetch" else None)) for name in off)
    return Action(
        setting=", ".join(off),
        old=now if fsdp else None,
        new=", ".join(value.split(".")[-1] for value in off.values()),
        how=how,
        costs=costs,
    )


def _units(job: RuleContext, gathers: CollectiveTraffic) -> Finding | None:
    """Units of another size: a bound, because how parameters fall into layers is not known."""
    whole = gathers.bytes / job.microbatches * _first_pass(job, gathers)
    latency = gathers.latency_share
    if gathers.largest >= HUGE * whole and gathers.count <= FEW * job.microbatches:
        problem = f"too large: one gather holds {gathers.largest / whole:.0%} of the parameters"
        bound_us, new = job.exposed_transfer_us * gathers.largest / whole, "each block"
        how = _wrap(job, "Each transformer block (or layer of similar size), then the whole model")
        costs = "None. Memory for gathered parameters shrinks to two blocks."
    elif latency is not None and latency >= LATENCY and gathers.count > FEW * job.microbatches:
        mean = byte_size(gathers.bytes / gathers.count)
        problem = f"too small: latency dominates {gathers.count:.0f} gathers of {mean} per step"
        # Each unit has its hooks, copies and calls on the host as well, and its gradients are reduced alone.
        bound_us = job.exposed_transfer_us + job.typical_us("idle_host") + job.typical_us("idle_launch")
        new = "larger units"
        how = _wrap(job, "Wrap less: whole blocks without the layers inside them, or two blocks together")
        costs = "Memory for gathered parameters grows with the unit."
    else:
        return None
    if bound_us < SHARE * job.step_time_us:
        return None
    return job.finding(
        RULE,
        f"FSDP units are {problem}",
        bound_us,
        evidence=_evidence(job, gathers),
        action=Action(setting="FSDP units", old=f"{gathers.count:.0f} gathers per step", new=new, how=how, costs=costs),
        confidence=Confidence.LOW,
    )


def _first_pass(job: RuleContext, gathers: CollectiveTraffic) -> float:
    """The forward's share of what a micro-batch gathers. The last unit of FSDP2 stays for the backward: it is gathered
    once, and those before it twice.
    """
    if _gathered_once(job):
        return 1.0
    count = round(gathers.count / job.microbatches)
    return (count + count % 2) / (2 * count) if count else 0.5


def _gathered_once(job: RuleContext) -> bool:
    """Do parameters stay for the backward? Then the steps can be replayed, but not without its gathers."""
    if job.predict is None or job.predict({}) is None:
        return False
    return job.predict({"fsdp.reshard_after_forward": "false"}) is None


def _wrap(job: RuleContext, what: str) -> str:
    if job.framework in ("accelerate", "transformers"):
        return f"{what}; with the name of their class for Block. " + in_accelerate(
            "fsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
            "  fsdp_transformer_layer_cls_to_wrap: Block",
        )
    if job.fsdp_version == 1:
        return f"{what}; with their class for Block:\n" + fsdp1(
            before="from functools import partial\n"
            "from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy\n"
            "policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})",
            auto_wrap_policy="policy",
        )
    return f"{what}. {fsdp2()}"


def _evidence(job: RuleContext, gathers: CollectiveTraffic) -> tuple[Evidence, ...]:
    return (
        job.exposed_transfer(),
        Evidence("parameter gathers per step", gathers.count, ranks=gathers.ranks),
        Evidence("largest gather", gathers.largest, "bytes", gathers.ranks),
        *known("latency of one gather, fitted", gathers.alpha_us, "us"),
    )
