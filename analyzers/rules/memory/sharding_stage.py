"""Shard less: fires when gathers of parameters are on the critical path and the job can do without some of them.

At stage 3 parameters are gathered for the forward and again for the backward. FSDP can hold them in between
(``SHARD_GRAD_OP``, ``reshard_after_forward=False``), DeepSpeed's stage 2 does not shard them at all. That takes the
bytes that were gathered; where these are not free, sharding inside a host only (HYBRID_SHARD, hpZ) avoids gathers over
the network.
Sources: ZeRO, SC'20; DeepSpeed ``memory.rst`` and ``config-json.md``; torch ``docs/source/notes/fsdp.rst``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from perfscope.analyzers.rules.communication.traffic import CollectiveTraffic, sharded_by_unknown, traffic
from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.memory.memory_limit import model_states
from perfscope.analyzers.rules.typed import fsdp1, fsdp2, in_accelerate, in_deepspeed
from perfscope.results.findings import Action, Confidence, Evidence, Finding
from perfscope.text import byte_size

RULE: Final = "sharding-stage"
SHARE: Final = 0.05
"""Share of the step that must be saved."""
_TO_STAGE_2: Final = {"zero.stage": "2"}
_KEPT: Final = {"fsdp.reshard_after_forward": "false"}
"""Changes after which parameters are gathered once per step."""
ACROSS: Final = 0.10
"""Least share of the step that is exposed transfer for advice to shard inside a host."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no gathers of parameters, overlapped ones, or no free memory for what they gather."""
    if job.exposed_transfer_us < SHARE * job.step_time_us or not (
        {"fsdp"} & set(job.info.strategies) or _is_zero3(job)
    ):
        return None
    gathers = traffic(job, "all_gather")
    found = _gathered_once(job, gathers)
    return _inside_hosts(job, gathers) if found is None and gathers is not None else found


def _is_zero3(job: RuleContext) -> bool:
    """Is it ZeRO's stage 3? Without metadata and ranges it is where the replay finds gathers of the backward."""
    if "zero3" in job.info.strategies:
        return True
    return sharded_by_unknown(job) and job.predict is not None and job.predict(_KEPT) is not None


def _gathered_once(job: RuleContext, gathers: CollectiveTraffic | None) -> Finding | None:
    """Parameters gathered once per step."""
    deepspeed = _is_zero3(job)
    change = _TO_STAGE_2 if deepspeed else _KEPT
    replayed = job.replayed(change, SHARE)
    # Gathered twice in each micro-batch, each time all but the rank's own shard.
    takes = None if gathers is None else gathers.bytes / (2 * job.microbatches) * (1 - 1 / max(len(gathers.ranks), 1))
    if replayed is None or job.lacks_memory(takes):
        return None
    prediction, saved_us = replayed
    return job.finding(
        RULE,
        # DeepSpeed keeps what is used again soon, so that the backward of a small model gathers nothing.
        f"{'ZeRO-3 gathers parameters module by module' if deepspeed else 'Parameters are gathered twice per step'}: "
        f"{job.exposed_share:.0%} of the step is exposed transfer",
        saved_us,
        evidence=_evidence(job, gathers, takes),
        action=replace(
            _stage_2(job) if deepspeed else _keep_parameters(job),
            costs=f"Up to {'all parameters' if takes is None else byte_size(takes)} more memory per rank; "
            f"{job.free_in_words}.",
        ),
        confidence=Confidence.LOW if job.free_bytes is None else job.confidence(),
        predicted=prediction,
        whatif=change,
    )


_STAGE_2: Final = Action(
    setting='"zero_optimization": {"stage": …}', old="3", new="2",
    how=in_deepspeed('{"zero_optimization": {"stage": 2}}') + "\nAccelerate: zero_stage in its deepspeed_config.",
)  # fmt: skip


def _stage_2(job: RuleContext) -> Action:
    """As DeepSpeed writes it, where it is known to shard."""
    if "zero3" in job.info.strategies:
        return _STAGE_2
    how = f"Where DeepSpeed shards: {_STAGE_2.how}\nIn code of your own: keep what was gathered for the backward."
    return replace(_STAGE_2, setting="ZeRO's stage", how=how)


def _keep_parameters(job: RuleContext) -> Action:
    """As FSDP's version in use writes it."""
    fsdp = job.settings("fsdp")
    if job.framework in ("accelerate", "transformers"):
        name, new = "fsdp_reshard_after_forward", "false"
        if job.fsdp_version == 1:
            name, new = "fsdp_sharding_strategy", "SHARD_GRAD_OP"
        how = in_accelerate(f"fsdp_config:\n  {name}: {new}")
        return Action(setting=name, old=str(fsdp.get("sharding_strategy", "true")), new=new, how=how)
    if job.fsdp_version == 1:
        old = str(fsdp.get("sharding_strategy", "FULL_SHARD"))
        new = "_HYBRID_SHARD_ZERO2" if "HYBRID" in old else "SHARD_GRAD_OP"
        how = fsdp1("ShardingStrategy", sharding_strategy=f"ShardingStrategy.{new}")
        return Action(setting="FullyShardedDataParallel(sharding_strategy=…)", old=old, new=new, how=how)
    how = fsdp2(reshard_after_forward=False)
    if job.fsdp_version is None:
        typed = fsdp1("ShardingStrategy", sharding_strategy="ShardingStrategy.SHARD_GRAD_OP")
        how += f"\nWith FSDP1:\n{typed}"
    old = str(fsdp.get("reshard_after_forward", True))
    return Action(setting="fully_shard(reshard_after_forward=…)", old=old, new="False", how=how)


def _inside_hosts(job: RuleContext, gathers: CollectiveTraffic) -> Finding | None:
    """Shards over the ranks of one host, replicas across hosts."""
    here = max((run.local_world_size for run in job.runs.values()), default=_ranks_per_host(job, gathers.ranks))
    if not gathers.across_hosts or not 2 <= here < len(gathers.ranks) or job.exposed_share < ACROSS:
        return None
    deepspeed = _is_zero3(job)
    takes = _more_inside(job, here, len(gathers.ranks), deepspeed=deepspeed)
    if job.lacks_memory(takes):
        return None
    times = (
        f"{len(gathers.ranks) / here:.3g} times as many bytes of the {'parameters' if deepspeed else 'sharded state'}"
    )
    more = times if takes is None else f"About {byte_size(takes)} more memory"
    # Gradients are reduced inside hosts, too, and an n-th of them between these.
    reduced = traffic(job, "reduce_scatter")
    moved_us = gathers.transfer_us + (0.0 if reduced is None else reduced.transfer_us)
    bound_us = min(job.exposed_transfer_us, moved_us)
    return job.finding(
        RULE,
        f"Parameters are gathered across hosts: {job.exposed_share:.0%} of the step is exposed transfer",
        bound_us,
        evidence=_evidence(job, gathers, takes),
        action=replace(
            _hybrid(job, here, len(gathers.ranks) // here, deepspeed=deepspeed),
            costs=f"{more} per rank; {job.free_in_words}.",
        ),
        confidence=Confidence.LOW,
    )


def _ranks_per_host(job: RuleContext, ranks: Sequence[int]) -> int:
    """The fewest of these ranks that a host has; 1 where the hosts of some are not known."""
    of_rank = {row.rank: row.host for row in job.summary.time_breakdown}
    hosts = Counter(of_rank.get(rank, "") for rank in ranks)
    return 1 if hosts[""] else min(hosts.values(), default=1)


def _more_inside(job: RuleContext, here: int, ranks: int, *, deepspeed: bool) -> float | None:
    """Bytes per rank that shards over ``here`` ranks take more than over all; None where the model is not known."""
    states = model_states(job)
    if states is None:
        return None
    if deepspeed:
        # hpZ stores a second copy of the parameters only, sharded inside the host.
        return states.parameters * states.each[0] / here
    return states.bytes_at(3, here) - states.bytes_at(3, ranks)


def _hybrid(job: RuleContext, here: int, hosts: int, *, deepspeed: bool) -> Action:
    if deepspeed:
        return Action(
            setting='"zero_hpz_partition_size"', old=None, new=str(here),
            how="As many as a host has ranks. "
            + in_deepspeed(f'{{"zero_optimization": {{"stage": 3, "zero_hpz_partition_size": {here}}}}}'),
        )  # fmt: skip
    mesh = f'mesh = init_device_mesh("cuda", ({hosts}, {here}), mesh_dim_names=("replicate", "shard"))'
    before, new = f"from torch.distributed.device_mesh import init_device_mesh\n{mesh}", f"({hosts}, {here})"
    if job.fsdp_version == 1:
        strategy = "ShardingStrategy.HYBRID_SHARD"
        how = fsdp1("ShardingStrategy", before=before, sharding_strategy=strategy, device_mesh="mesh")
        setting = "FullyShardedDataParallel(sharding_strategy=HYBRID_SHARD, device_mesh=…)"
        return Action(setting=setting, old=None, new=new, how=how)
    return Action(setting="fully_shard(mesh=…)", old=None, new=new, how=fsdp2(before=before, mesh="mesh"))


def _evidence(job: RuleContext, gathers: CollectiveTraffic | None, takes: float | None) -> tuple[Evidence, ...]:
    if gathers is None or takes is None:
        return (job.exposed_transfer(), *job.free_memory())
    return (
        job.exposed_transfer(),
        Evidence("parameter gathers per step", gathers.count, ranks=gathers.ranks),
        Evidence("bytes gathered per step", gathers.bytes, "bytes", gathers.ranks),
        Evidence("memory that the change takes per rank", takes, "bytes"),
        *job.free_memory(),
    )
