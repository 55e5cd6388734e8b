"""Sharding that overlaps nothing, in traces without metadata: fires where parameters are gathered when a layer needs
them, gradients are reduced while the backward waits, or both after the backward.

Which wrapper shards is not recorded: DeepSpeed's ZeRO, Megatron's distributed optimizer, or code of the user's own.
FSDP records ranges, and has ``fsdp_prefetch``. So what to change is said for each; of one alone where names show it.
``deepspeed_buckets`` and ``megatron_overlap`` know the settings of jobs that recorded them.
"""

from __future__ import annotations

import json
from dataclasses import field
from typing import Final

from perfscope.analyzers.rules.communication.gradients_by_hand import OVERLAPPED
from perfscope.analyzers.rules.communication.traffic import CollectiveTraffic, sharded_by_unknown, traffic
from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.typed import in_deepspeed
from perfscope.analyzers.whatif.ddp import BACKWARD_SHARE
from perfscope.frozen import dataclass
from perfscope.results.findings import Action, Confidence, Evidence, Finding, Prediction, code
from perfscope.text import byte_size

RULE: Final = "sharded-overlap"
SHARE: Final = 0.05
"""Share of the step that must be saved."""
EXPOSED: Final = 0.2
"""Least share of the step that is exposed transfer where the gain is a bound only."""
_DEEPSPEED: Final = "DeepSpeed"
_MEGATRON: Final = "Megatron-LM"
_OF_MEGATRON: Final = "_PARALLEL_GROUP"
"""In descriptions of its groups."""

_GATHER_AHEAD: Final = (
    "In code of your own: start the next layer's gather with async_op=True before a layer computes, and wait for it "
    "where the next one begins."
)
_REDUCE_BESIDE: Final = (
    "In code of your own: reduce with async_op=True in the backward's hooks, and wait for all reductions before the "
    "optimizer's step."
)
_OVERLAP_COMM: Final = "overlap_comm", in_deepspeed('{"zero_optimization": {"overlap_comm": true}}')
_OVERLAP_FLAGS: Final = (
    "--overlap-grad-reduce, --overlap-param-gather",
    "On Megatron's command line:\n"
    + code("shell", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
)


@dataclass(frozen=True)
class _Late:
    """One way in which nothing overlaps, and what to change."""

    title: str
    setting: str
    old: str
    new: str
    change: str
    """In words."""
    by_framework: dict[str, tuple[str, str]]
    """Framework -> (its settings, how to change them)."""
    by_hand: str
    """The same in code of the user's own."""
    moved: CollectiveTraffic | None
    saved_us: float
    prediction: Prediction | None = None
    whatif: dict[str, str] = field(default_factory=dict)


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: nothing is sharded, its wrapper is recorded, it is overlapped, or little would be saved."""
    # Without the other ranks a wait for them looks like a transfer.
    if not job.on_devices or job.info.missing_ranks or not sharded_by_unknown(job):
        return None
    replayed = filter(None, (_gathered_late(job), _reduced_while_waiting(job)))
    late = max(replayed, key=lambda one: one.saved_us, default=None) or _all_late(job)
    if late is None:
        return None
    moved = late.moved
    return job.finding(
        RULE,
        late.title,
        late.saved_us,
        evidence=(
            job.exposed_transfer(),
            Evidence("overlapped share of the communication, or of less compute", job.hidden_share, "share"),
            *(() if moved is None else (Evidence(f"{moved.kind} per step", moved.count, ranks=moved.ranks),)),
        ),
        action=Action(
            setting=late.setting, old=late.old, new=late.new, how=_how(job, late),
            costs="Memory for what is in flight" + (f": about {byte_size(2 * moved.largest)}." if moved else "."),
        ),
        confidence=job.confidence() if late.prediction is not None else Confidence.LOW,
        predicted=late.prediction,
        whatif=late.whatif,
    )  # fmt: skip


def _gathered_late(job: RuleContext) -> _Late | None:
    """Parameters that could be gathered one layer earlier, replayed."""
    whatif = {"fsdp.prefetch": "1"}
    replayed = job.replayed(whatif, SHARE)
    if replayed is None:
        return None
    gathers = traffic(job, "all_gather")
    zero: dict[str, object] = {"stage": 3, "overlap_comm": True}
    if gathers is not None:
        zero["stage3_prefetch_bucket_size"] = 2 * gathers.largest // gathers.element_bytes
    typed = in_deepspeed(json.dumps({"zero_optimization": zero}))
    return _Late(
        title="Layers wait for parameters that could be gathered while the previous layer computes: "
        f"{job.exposed_share:.0%} of the step is exposed transfer",
        setting="gathers of parameters", old="when a layer needs them", new="one layer earlier",
        change="Gather each layer's parameters while the layer before it computes",
        by_framework={_DEEPSPEED: ("stage3_prefetch_bucket_size", f"Room for two layers, in elements. {typed}")},
        by_hand=_GATHER_AHEAD,
        moved=gathers, saved_us=replayed[1], prediction=replayed[0], whatif=whatif,
    )  # fmt: skip


def _reduced_while_waiting(job: RuleContext) -> _Late | None:
    """Reductions that the backward waits for, replayed beside it."""
    whatif = {"zero.overlap_comm": "true"}
    replayed = job.replayed(whatif, SHARE)
    if replayed is None:
        return None
    return _Late(
        title="Gradients are reduced while the backward waits: "
        f"{job.exposed_share:.0%} of the step is exposed transfer",
        setting="reductions of gradients", old="the backward waits", new="the backward goes on",
        change="Reduce gradients while the backward goes on",
        by_framework={_DEEPSPEED: _OVERLAP_COMM}, by_hand=_REDUCE_BESIDE,
        moved=traffic(job, "reduce_scatter", "all_reduce"),
        saved_us=replayed[1], prediction=replayed[0], whatif=whatif,
    )  # fmt: skip


def _all_late(job: RuleContext) -> _Late | None:
    """Gradients reduced after the backward, parameters gathered before the forward: compute could hide as much of the
    one as a backward takes, and of the other as a forward. Where nothing overlaps, that is a bound.
    """
    reduced, gathered = traffic(job, "reduce_scatter", "all_reduce"), traffic(job, "all_gather")
    if reduced is None or gathered is None or job.hidden_share > OVERLAPPED:
        return None
    compute_us = job.typical_us("compute")
    hidden_us = min(reduced.transfer_us, BACKWARD_SHARE * compute_us)
    hidden_us += min(gathered.transfer_us, (1 - BACKWARD_SHARE) * compute_us)
    exposed_us = job.exposed_of_us(reduced.transfer_us + gathered.transfer_us)
    saved_us = min(hidden_us, exposed_us)
    if job.share(exposed_us) < EXPOSED or saved_us < SHARE * job.step_time_us:
        return None
    return _Late(
        title="Gradients are reduced and parameters gathered where no compute overlaps that: "
        f"{job.share(exposed_us):.0%} of the step is exposed transfer",
        setting="reductions and gathers", old="beside no compute", new="beside the backward and the forward",
        change="Reduce gradients while the backward goes on, and gather parameters while the forward does",
        by_framework={_MEGATRON: _OVERLAP_FLAGS, _DEEPSPEED: _OVERLAP_COMM}, by_hand=_REDUCE_BESIDE,
        moved=reduced, saved_us=saved_us,
    )  # fmt: skip


def _how(job: RuleContext, late: _Late) -> str:
    """What to change, in the settings of the framework whose names the trace holds; else in those of each."""
    shown = {
        _DEEPSPEED: any(_DEEPSPEED in row.name for row in job.summary.modules),
        _MEGATRON: any(_OF_MEGATRON in row.role_from for row in job.summary.groups),
    }
    known = {framework: said for framework, said in late.by_framework.items() if shown[framework]}
    chosen = known or late.by_framework
    settings = "; ".join(f"{framework}: {names}" for framework, (names, _) in chosen.items())
    return "\n".join(
        (f"{late.change} ({settings}).", *(how for _, how in chosen.values()), *[late.by_hand] * (not known))
    )
