"""Shard less: fires when gathers of parameters are on the critical path and the job can do without some of them.

At stage 3 parameters are gathered for the forward and again for the backward. FSDP can keep them from one to the other
(``SHARD_GRAD_OP``, ``reshard_after_forward=False``), DeepSpeed's stage 2 keeps them for good. That takes the bytes that
were gathered; where these are not free, sharding inside a host only (HYBRID_SHARD, hpZ) keeps gathers off the network.
Sources: ZeRO, SC'20; DeepSpeed ``memory.rst`` and ``config-json.md``; torch ``docs/source/notes/fsdp.rst``.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.frameworks import framework, settings_of
from perfscope.analyzers.rules.model_states import model_states
from perfscope.analyzers.rules.traffic import Traffic, gib, replayed, room_bytes, sure, traffic
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling

RULE: Final = "sharding-stage"
SHARE: Final = 0.05
"""Share of the step that must be saved."""
ACROSS: Final = 0.10
"""Share of the step of exposed transfer from which gathers between hosts call for sharding inside one."""
SPARE: Final = 1.1
"""What must be free, over what the change takes: the allocator needs room too."""


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: no gathers of parameters, hidden ones, or no room to keep what they gather."""
    gathers = traffic(facts, "all_gather")
    exposed_us = facts.typical_us("exposed_comm_transfer")
    if gathers is None or exposed_us < SHARE * facts.step_time_us:
        return None
    if not {"fsdp", "zero3"} & set(facts.strategies):
        return None
    return _kept(facts, gathers, exposed_us) or _inside_hosts(facts, gathers, exposed_us)


def _kept(facts: JobFacts, gathers: Traffic, exposed_us: float) -> Finding | None:
    """Parameters gathered once a step."""
    deepspeed = "zero3" in facts.strategies
    change = {"zero.stage": "2"} if deepspeed else {"fsdp.reshard_after_forward": "false"}
    found = replayed(facts, change, SHARE)
    # Gathered twice a step, each time all but the rank's own shard.
    takes = gathers.bytes / 2 * (1 - 1 / max(len(gathers.ranks), 1))
    room = room_bytes(facts)
    if found is None or (room is not None and room < SPARE * takes):
        return None
    prediction, saved_us = found
    fits = f"{gib(room)} are free on the fullest rank" if room is not None else "look whether that is free"
    setting, old, new, how = _stage_2() if deepspeed else _keep_parameters(facts)
    return Finding(
        rule=RULE,
        title="Parameters are gathered twice a step, and exposed transfer takes "
        f"{exposed_us / facts.step_time_us:.0%} of it",
        severity=Severity.of_share(saved_us / facts.step_time_us),
        evidence=_evidence(facts, gathers, exposed_us, takes, room),
        action=Action(
            setting=setting, old=old, new=new, how=how, costs=f"Up to {gib(takes)} more memory on each rank; {fits}."
        ),
        confidence=Confidence.LOW if room is None else sure(facts),
        obtained=Obtained.REPLAYED,
        ceiling=ceiling(facts.step_time_us, saved_us),
        predicted_step_ns=prediction,
        whatif=change,
    )


def _stage_2() -> tuple[str, str | None, str, str]:
    return (
        '"zero_optimization": {"stage": …}', "3", "2",
        '"zero_optimization": {"stage": 2} in the DeepSpeed JSON (Accelerate: deepspeed_config: zero_stage: 2).',
    )  # fmt: skip


def _keep_parameters(facts: JobFacts) -> tuple[str, str | None, str, str]:
    """As FSDP's version in use writes it."""
    fsdp = settings_of(facts, "fsdp")
    if framework(facts) in ("accelerate", "transformers"):
        how = "fsdp_config: fsdp_reshard_after_forward: false in the file of accelerate config"
        if fsdp.get("version") == 1:
            how = "fsdp_config: fsdp_sharding_strategy: SHARD_GRAD_OP in the file of accelerate config"
        return "fsdp_config", str(fsdp.get("sharding_strategy", "true")), how.rpartition(": ")[2].split()[0], how + "."
    if fsdp.get("version") == 1:
        old = str(fsdp.get("sharding_strategy", "FULL_SHARD"))
        new = "_HYBRID_SHARD_ZERO2" if "HYBRID" in old else "SHARD_GRAD_OP"
        how = f"FullyShardedDataParallel(model, …, sharding_strategy=ShardingStrategy.{new})"
        return "FullyShardedDataParallel(sharding_strategy=…)", old, new, how
    how = "fully_shard(module, …, reshard_after_forward=False) for every module"
    if not fsdp:
        how += "; FSDP1: sharding_strategy=ShardingStrategy.SHARD_GRAD_OP"
    return "fully_shard(reshard_after_forward=…)", str(fsdp.get("reshard_after_forward", True)), "False", how


def _inside_hosts(facts: JobFacts, gathers: Traffic, exposed_us: float) -> Finding | None:
    """Shards spread over one host's ranks, and copies across hosts."""
    here = max((run.local_world_size for run in facts.runs.values()), default=1)
    if not gathers.across_hosts or exposed_us < ACROSS * facts.step_time_us or here < 2 or here >= len(gathers.ranks):
        return None
    states = model_states(facts)
    room = room_bytes(facts)
    if states is None or room is None:
        return None
    takes = states.bytes_at(3, here) - states.bytes_at(3, len(gathers.ranks))
    deepspeed = "zero3" in facts.strategies
    if deepspeed:
        # hpZ keeps a second copy of the parameters only, sharded inside the host.
        takes = states.parameters * states.each[0] / here
    if room < SPARE * takes:
        return None
    bound_us = min(exposed_us, gathers.transfer_us)
    setting, new, how = _hybrid(facts, here, len(gathers.ranks) // here, deepspeed=deepspeed)
    return Finding(
        rule=RULE,
        title=f"Parameters are gathered across hosts, and {exposed_us / facts.step_time_us:.0%} of the step is exposed "
        "transfer",
        severity=Severity.of_share(bound_us / facts.step_time_us),
        evidence=_evidence(facts, gathers, exposed_us, takes, room),
        action=Action(
            setting=setting, old=None, new=new, how=how,
            costs=f"About {gib(takes)} more memory on each rank; {gib(room)} are free on the fullest.",
        ),
        confidence=Confidence.LOW,
        obtained=Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, bound_us),
    )  # fmt: skip


def _hybrid(facts: JobFacts, here: int, hosts: int, *, deepspeed: bool) -> tuple[str, str, str]:
    if deepspeed:
        return (
            '"zero_hpz_partition_size"', str(here),
            f'"zero_optimization": {{"stage": 3, "zero_hpz_partition_size": {here}}}: ranks of one host.',
        )  # fmt: skip
    if settings_of(facts, "fsdp").get("version") == 1:
        how = "FullyShardedDataParallel(model, …, sharding_strategy=ShardingStrategy.HYBRID_SHARD)"
        return "FullyShardedDataParallel(sharding_strategy=…)", "HYBRID_SHARD", how
    mesh = f'init_device_mesh("cuda", ({hosts}, {here}), mesh_dim_names=("replicate", "shard"))'
    return "fully_shard(mesh=…)", f"({hosts}, {here})", f"fully_shard(module, …, mesh={mesh}) for every module."


def _evidence(
    facts: JobFacts, gathers: Traffic, exposed_us: float, takes: float, room: int | None
) -> tuple[Evidence, ...]:
    rows = [
        Evidence(what="exposed communication transfer per step", value=exposed_us, unit="us", ranks=facts.ranks),
        Evidence(what="gathers of parameters per step", value=gathers.count, unit="", ranks=gathers.ranks),
        Evidence(what="bytes gathered per step", value=gathers.bytes, unit="bytes", ranks=gathers.ranks),
        Evidence(what="memory that the change takes on each rank", value=takes, unit="bytes"),
    ]
    if room is not None:
        rows.append(Evidence(what="memory free on the fullest rank", value=room, unit="bytes"))
    return tuple(rows)
