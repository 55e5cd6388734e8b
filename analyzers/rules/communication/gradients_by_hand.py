"""Gradients reduced by hand: fires when a loop after the backward all-reduces every gradient by itself, or reduces it
to one rank and broadcasts it back.

Each all-reduce pays its latency, and none overlaps the backward, which is over. DistributedDataParallel reduces
buckets of gradients while the backward goes on (Li et al., VLDB 2020); ``torch._utils._flatten_dense_tensors`` makes
one all-reduce of the loop, which keeps the rest of it. Both are replayed (``whatif.by_hand``), the better one is
advised. Where ranks are missing from the recording, the gain is bounded by the latencies and by what is exposed.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.communication.reductions import GradientReductions, reductions, returned
from perfscope.analyzers.rules.communication.traffic import sharded_by_unknown
from perfscope.analyzers.rules.context import RuleContext, known
from perfscope.analyzers.whatif.by_hand import MANY
from perfscope.frozen import dataclass
from perfscope.results.findings import GRADIENTS_BY_HAND, Action, Confidence, Evidence, Finding, Prediction, code
from perfscope.text import duration

RULE: Final = GRADIENTS_BY_HAND
SHARE: Final = 0.05
"""Share of the step that must be saved."""
OVERLAPPED: Final = 0.1
"""Share of the communication that is overlapped at most: after the backward there is nothing to overlap it with."""
CLOSE: Final = 0.02
"""Share of the step by which DDP must beat one flat all-reduce, which changes less, to be advised."""

_WRAPPED: Final = {"ddp", "fsdp", "zero1", "zero2", "zero3", "tensor", "pipeline"}
"""Strategies that reduce gradients themselves."""

_LET_DDP: Final = (
    "DDP averages the gradients in loss.backward(): take the loop of {calls} calls out, and wrap the model before "
    "the training loop:\n"
) + code("python", "model = torch.nn.parallel.DistributedDataParallel(model)")
LET_DDP: Final = _LET_DDP.format(calls="all_reduce")
_ACCUMULATED: Final = "\nAll micro-batches but the last run under `with model.no_sync():`, forward and backward."
FLAT: Final = code(
    "python",
    "grads = [p.grad for p in model.parameters() if p.grad is not None]\n"
    "flat = torch._utils._flatten_dense_tensors(grads)\n"
    "torch.distributed.all_reduce(flat)\n"
    "flat.div_(torch.distributed.get_world_size())\n"
    "torch._foreach_copy_(grads, torch._utils._unflatten_dense_tensors(flat, grads))",
)


@dataclass(frozen=True)
class _Called:
    """What a loop calls for each gradient, in words: in titles, as evidence, as what is changed, and in code."""

    many: str
    one: str
    counted: str
    old: str
    calls: str


_ALL_REDUCES: Final = _Called(
    many="all-reduces of single gradients", one="one all-reduce", counted="all-reduces per step",
    old="one for each parameter", calls="all_reduce",
)  # fmt: skip
_PAIRS: Final = _Called(
    many="reductions of single gradients to one rank, and as many broadcasts back,", one="one reduction and broadcast",
    counted="reductions with broadcasts back per step", old="a reduction and a broadcast for each parameter",
    calls="reduce and broadcast",
)  # fmt: skip


@dataclass(frozen=True)
class _Way:
    """One of the two changes, replayed where ``predicted`` is set."""

    name: str
    """Value of ``gradients.reduce``."""
    saved_us: float
    predicted: Prediction | None = None
    shown: Prediction | None = None
    """The same without the profiler, where that is known: what is said of the first way, so of the other too."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: something else reduces the gradients, in few all-reduces or in the backward, or little
    would be saved.
    """
    pairs = returned(job)
    reduced = pairs or reductions(job)
    if reduced is None or _reduced_by_others(job) or job.hidden_share > OVERLAPPED:
        return None
    # Of the same group the loop may reduce a loss or metrics.
    others = job.loop_collectives.get("all_reduce", 0.0) + job.reduced_in_backward
    count = reduced.count if pairs else reduced.count - others
    if count * (1 if pairs is None else 2) < MANY:
        return None
    called = _PAIRS if pairs else _ALL_REDUCES
    exposed_us = job.exposed_of_us(count * reduced.transfer_us)
    rows = job.summary.time_breakdown
    ways = _replayed(job) or _bounded(reduced, count, exposed_us)
    best = ways[0]
    if best.saved_us < SHARE * job.step_time_us:
        return None
    return job.finding(
        RULE,
        f"{count:.0f} {called.many} follow the backward, one by one: they take {job.share(exposed_us):.0%} of the step",
        best.saved_us,
        evidence=(
            Evidence(called.counted, count, ranks=job.ranks),
            *known("gradient bytes per step", reduced.bytes, "bytes", job.ranks),
            *known(f"latency of {called.one}, fitted", reduced.alpha_us, "us", job.ranks),
            job.exposed_transfer(),
            Evidence("overlapped communication per step", sum(row.hidden_comm_us for row in rows) / len(rows), "us"),
        ),
        action=Action(
            setting="gradient all-reduce",
            old=called.old,
            new="DistributedDataParallel" if best.name == "ddp" else "one for all",
            how=_how(job, ways, called),
            costs="DDP keeps a copy of the gradients in its buckets, unless gradient_as_bucket_view=True."
            if best.name == "ddp"
            else "One tensor of the size of all gradients.",
        ),
        confidence=job.confidence() if best.predicted is not None else Confidence.LOW,
        predicted=best.predicted,
        whatif={"gradients.reduce": best.name} if best.predicted is not None else None,
    )


def _reduced_by_others(job: RuleContext) -> bool:
    """Does a wrapper reduce the gradients, or one that shards what DistributedDataParallel would not?"""
    return bool(_WRAPPED & set(job.info.strategies)) or sharded_by_unknown(job)


def _replayed(job: RuleContext) -> list[_Way]:
    """Both changes, the one to make first; empty where they cannot be replayed."""
    ways, steps_us = [], []
    for name in ("ddp", "flat"):
        change = {"gradients.reduce": name}
        step = job.predict(change) if job.predict is not None else None
        if step is not None:
            shown, _ = job.without_profiler(step, change)
            ways.append(_Way(name, job.step_time_us - step.mid, step, shown))
            steps_us.append(shown.mid)
    if len(ways) == 2 and steps_us[0] > steps_us[1] - CLOSE * job.info.step_us:
        ways.reverse()
    return ways


def _bounded(reduced: GradientReductions, count: float, exposed_us: float) -> list[_Way]:
    """What overlapping all of them would save, and what the latencies of all but one are."""
    latencies_us = (count - 1) * (reduced.alpha_us or 0.0)
    return [_Way("ddp", exposed_us), _Way("flat", min(latencies_us, exposed_us))]


def _how(job: RuleContext, ways: list[_Way], called: _Called) -> str:
    """The first way, then the other."""
    accumulates = job.info.batches_per_step is not None and job.info.batches_per_step > 1
    texts = {"ddp": _LET_DDP.format(calls=called.calls) + (_ACCUMULATED if accumulates else ""), "flat": FLAT}
    first, *others = ways
    at_once = f"Reduce all gradients at once, in place of the loop of {called.calls} calls:\n"
    lines = [(at_once if first.name == "flat" else "") + texts[first.name]]
    for other in others:
        takes = f" (predicted: {duration(other.shown.mid)} per step)" if other.shown is not None else ""
        keeps = (
            "Or keep the loop's place and reduce once" if other.name == "flat" else "Or let DDP overlap the backward"
        )
        lines.append(f"{keeps}{takes}:\n{texts[other.name]}")
    return "\n".join(lines)
