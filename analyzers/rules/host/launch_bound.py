"""Launch-bound: fires when devices of most ranks wait for the host to launch their next kernel, or those of the ranks
that the others wait for.

Hosts launch behind whatever their devices wait for. So where all are as slow, those of the ranks that come last show
it, and the others' devices have their kernels queued by the time that these are done; the replay tells what it costs.

Fused optimizers make one kernel of many; ``torch.compile`` fuses elementwise kernels, and on devices that have them its
CUDA (HIP) graphs launch a whole step at once. The replay without any launch and operator cost shows their joint effect.
One rank alone that launches slowly is a straggler. Source: PyTorch performance tuning guide, "Fuse operations" and "Use
CUDA Graphs".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from perfscope.analyzers.losses import launches_few
from perfscope.analyzers.rules.communication.unused_parameters import lost_in_search_us
from perfscope.analyzers.rules.context import RuleContext, known
from perfscope.analyzers.rules.cpu_optimizer import STEP_OF, optimizer_steps
from perfscope.analyzers.rules.host.debug_settings import launches_block
from perfscope.analyzers.rules.typed import call, in_accelerate, training_arguments
from perfscope.results.findings import Action, Confidence, Evidence, Finding, Prediction, code
from perfscope.results.tables import LaunchRow
from perfscope.results.time_breakdown import TimeBreakdown

RULE: Final = "launch-bound"
SHARE: Final = 0.05
"""Least share of the step in which devices wait for launches."""
SOMEWHERE: Final = 0.02
"""The same of one rank, where the replay saves ``SHARE`` of the step on top of what any straggler costs."""
NOISE: Final = 0.02
"""Least share of the step that the replay saves: with less, something other than launches limits the step."""
EXPLAINED: Final = 0.8
"""Share of the saving from which a straggler is what there is to say."""
OPTIMIZER_SHARE: Final = 0.25
"""The optimizer is named first when it launches at least this share of all kernels."""
FUSED: Final = ("Adam", "AdamW", "SGD", "Adagrad")
"""torch's optimizers that take ``fused=True``."""
_GRAPHS: Final = ("reduce-overhead", "max-autotune")
"""Modes of ``torch.compile`` that use CUDA graphs."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: launches are fast enough or not recorded, or every launch is set to block."""
    idle = job.typical_us("idle_launch")
    waiting, longest = max(idle - lost_in_search_us(job), 0.0), _longest(job)
    of_most = waiting >= SHARE * job.step_time_us
    if not (of_most or longest.idle_launch_us >= SOMEWHERE * job.step_time_us) or launches_block(job):
        return None
    if launches_few(job.summary):
        return None
    whatif = _whatif(job)
    step = job.predict(whatif) if whatif and job.predict is not None else None
    if step is not None and step.mid > (1 - NOISE) * job.step_time_us:
        return None
    if step is not None and _is_told(job, job.step_time_us - step.mid):
        return None
    loops = without_loops(job)
    if not of_most:
        return None if step is None or loops is not None else _behind_others(job, longest, step, whatif)
    if step is not None and loops is not None:
        step = _beside_loops(job, whatif, loops[0])
        if step is None:
            return None
    if step is not None and job.step_time_us - step.mid >= idle:
        waiting = idle  # hosts that are ahead search meanwhile
    note = job.median_note("idle_launch")
    return job.finding(
        RULE,
        f"Launch-bound: devices wait {job.share(waiting):.0%} of the step for the host's next launch{note}",
        waiting,
        evidence=_evidence(job),
        action=_action(job, loops=loops is not None),
        confidence=Confidence.LOW if job.info.few_steps else Confidence.MEDIUM,
        predicted=None if step is None else _without_other_waits(step, job, waiting),
        whatif=whatif,
    )


def _longest(job: RuleContext) -> TimeBreakdown:
    """That of the rank whose device waits longest for launches."""
    return max(job.summary.time_breakdown, key=lambda row: row.idle_launch_us)


def _behind_others(
    job: RuleContext, longest: TimeBreakdown, replayed: Prediction, whatif: dict[str, str]
) -> Finding | None:
    """The finding where few devices wait for launches, and most for those; None where the replay saves little beside
    what a straggler costs, which has a finding of its own.
    """
    step = _without_other_waits(replayed, job, longest.idle_launch_us)
    saved_us = job.step_time_us - step.mid
    worst = max((row.lost_us for row in job.summary.stragglers), default=0.0)
    if saved_us - worst < SHARE * job.step_time_us:
        return None
    return job.finding(
        RULE,
        f"Launch-bound: a step takes {job.share(saved_us):.0%} less with launches that cost nothing: devices wait for "
        f"their host's next launch, that of rank {longest.rank} for {job.share(longest.idle_launch_us):.0%} of the "
        "step, and most others wait for such a rank",
        saved_us,
        evidence=(
            Evidence(
                "device idle while the host launches (longest)", longest.idle_launch_us, "us", (longest.rank,)
            ),
            *_evidence(job),
        ),
        action=_action(job, loops=False),
        confidence=Confidence.LOW if job.info.few_steps else Confidence.MEDIUM,
        predicted=step,
        whatif=whatif,
    )  # fmt: skip


def _is_told(job: RuleContext, saved_us: float) -> bool:
    """Is it mostly a straggler, a rank or host that launches more slowly than its peers, or DDP's search for unused
    parameters? Graphs and compiled code leave that as it is.
    """
    worst = max((row.lost_us for row in job.summary.stragglers if row.cause == "launch"), default=0.0)
    return worst >= EXPLAINED * saved_us or lost_in_search_us(job) >= EXPLAINED * saved_us


def _beside_loops(job: RuleContext, whatif: Mapping[str, str], without: Prediction) -> Prediction | None:
    """The step with faster launches, but without what they save in an optimizer's loop, which the rule
    ``optimizer-kernels`` tells; None where that is all but little.
    """
    both = job.predict({**NO_LOOPS, **whatif}) if job.predict is not None else None
    if both is None or without.mid - both.mid < SHARE * job.step_time_us:
        return None
    kept_us = job.step_time_us - without.mid
    return Prediction(low=both.low + kept_us, mid=both.mid + kept_us, high=both.high + kept_us)


NO_LOOPS: Final = {"optimizer.loops": "0"}


def without_loops(job: RuleContext) -> tuple[Prediction, float] | None:
    """(the step with an optimizer of few kernels, the µs that this saves); None where that is little, or not known."""
    return job.replayed(NO_LOOPS, SHARE) if optimizer_kernels(job) else None


def _without_other_waits(replayed: Prediction, job: RuleContext, waiting_us: float) -> Prediction:
    """Faster launches are expected to save what the replay says, but for waits for data, and for pauses of hosts where
    those are longer.

    The replay launches everything at once. Its host is then free to load data, or to pause, while the devices compute,
    which saves the waits for that too. They have findings of their own, so they count for ``low`` only.
    """
    paused = job.typical_us("idle_host")
    others = job.typical_us("idle_dataloader") + (paused if paused > waiting_us else 0.0)
    mid = min(replayed.mid + others, max(replayed.mid, job.step_time_us - waiting_us))
    return Prediction(low=replayed.low, mid=mid, high=max(replayed.high, mid))


def _whatif(job: RuleContext) -> dict[str, str]:
    """Nothing where ranks are missing: what they send would be replayed as late as it was recorded."""
    alone = bool(job.info.missing_ranks) or any(row.wait_is_bound for row in job.summary.time_breakdown)
    return {} if alone else {"host.launch": "0"}


def _evidence(job: RuleContext) -> tuple[Evidence, ...]:
    worst = max(job.summary.launches, key=lambda row: row.launches_per_step, default=None)
    return (
        Evidence("device idle while the host launches (median)", job.typical_us("idle_launch"), "us", job.ranks),
        *(() if worst is None else _of_launches(worst)),
        *known("kernels launched by the optimizer", _optimizer_share(job) or None, "share", job.ranks),
    )


def _of_launches(row: LaunchRow) -> tuple[Evidence, ...]:
    """Of the rank that launches most."""
    who = (row.rank,)
    return (
        Evidence("launches per step", row.launches_per_step, ranks=who),
        *known("kernels shorter than 10 µs", row.short_kernels_share, "share", who),
        *known("launches to an idle device", row.starved_share, "share", who),
    )


def optimizer_kernels(job: RuleContext) -> float:
    """Kernels launched in the optimizer's step, per step; 0 where that is not marked."""
    return max((row.kernels_per_step for row in optimizer_steps(job)), default=0.0)


def _optimizer_share(job: RuleContext) -> float:
    """Share of all kernels that are launched in the optimizer's step; 0 where that is not marked."""
    kernels = sum(kernel.count_per_step for kernel in job.summary.kernels if kernel.category == "compute")
    return min(optimizer_kernels(job) / kernels, 1.0) if kernels else 0.0


_COMPILING: Final = "Compilation takes minutes at the start and again for new shapes"


def _action(job: RuleContext, *, loops: bool) -> Action:
    """The optimizer where it launches much and is not fused, and no loop that is told besides (``loops``); else
    compiling, with graphs of the step where possible.
    """
    if not loops and _optimizer_share(job) >= OPTIMIZER_SHARE and (fused := fused_optimizer(job)) is not None:
        return replace(fused, how=f"{fused.how}\nThen:\n{_compile(job)}")
    compiled = job.settings("compile")
    mode = str(compiled.get("mode") or "default") if compiled else None
    if mode in _GRAPHS or (mode is not None and job.graphs is None):
        logs = "graph_breaks,recompiles,cudagraphs" if job.graphs else "graph_breaks,recompiles"
        how = (
            f"The model is compiled with mode={mode!r} already: look for what runs outside its "
            f"graphs (TORCH_LOGS={logs}). {_LONGER}"
        )
        return Action(setting="torch.compile", old=None, new=None, how=how, costs=f"{_COMPILING}.")
    if job.graphs is None:
        return Action(setting="torch.compile", old=None, new="on", how=_compile(job), costs=f"{_COMPILING}.")
    costs = f"{_COMPILING}; {job.graphs} hold their memory."
    return Action(setting="torch.compile(mode=…)", old=mode, new='"reduce-overhead"', how=_compile(job), costs=costs)


def fused_optimizer(job: RuleContext) -> Action | None:
    """One kernel for many parameters; None where the optimizer is fused already, or has no such implementation."""
    optimizer = job.settings("optimizer")
    ranges = (row.name.removeprefix(STEP_OF).split(".")[0] for row in job.summary.modules if STEP_OF in row.name)
    classes = [name for name in optimizer.get("classes", ranges) if name in FUSED]
    if not classes or optimizer.get("fused"):
        return None
    if job.framework == "transformers":
        how = training_arguments(optim='"adamw_torch_fused"')
        return Action(setting="TrainingArguments(optim=…)", old=None, new="adamw_torch_fused", how=how)
    typed = call(f"optimizer = torch.optim.{classes[0]}", "model.parameters()", fused=True)
    how = f"One kernel for many parameters:\n{typed}"
    return Action(setting=f"torch.optim.{classes[0]}(fused=…)", old="False", new="True", how=how)


_LONGER: Final = "A larger batch per rank makes kernels longer."
_PLAIN: Final = {
    "transformers": training_arguments(torch_compile=True),
    "accelerate": in_accelerate("dynamo_config:\n  dynamo_backend: INDUCTOR"),
    "deepspeed": code("python", "engine.compile()"),
    "torch": code("python", "model = torch.compile(model)"),
    "lightning": "Before trainer.fit:\n" + code("python", "model = torch.compile(model)"),
}
"""Framework -> how to compile."""
_WITH_GRAPHS: Final = {
    "transformers": training_arguments(torch_compile=True, torch_compile_mode='"reduce-overhead"'),
    "accelerate": in_accelerate("dynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_mode: reduce-overhead"),
    "deepspeed": code("python", 'engine.compile(compile_kwargs={"mode": "reduce-overhead"})'),
    "megatron": code("shell", "--enable-cuda-graph  # in newer releases --cuda-graph-impl local"),
    "torch": code("python", 'model = torch.compile(model, mode="reduce-overhead")'),
    "lightning": "Before trainer.fit:\n" + code("python", 'model = torch.compile(model, mode="reduce-overhead")'),
}
"""Framework -> how to compile with graphs."""


def _compile(job: RuleContext) -> str:
    """How to compile: with graphs where the devices have them."""
    if job.graphs is None:
        return f"{_PLAIN.get(job.framework, _PLAIN['torch'])}\nThat fuses kernels. {_LONGER}"
    return (
        f"{_WITH_GRAPHS.get(job.framework, _WITH_GRAPHS['torch'])}\nThat fuses kernels and launches them as "
        f"{job.graphs}. {_LONGER}"
    )
