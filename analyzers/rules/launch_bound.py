"""Launch-bound: fires when devices of most ranks wait for the host to launch their next kernel.

Fused optimizers make one kernel of many; ``torch.compile`` fuses elementwise kernels, and its CUDA graphs launch a
whole step at once. The replay without any launch and operator cost is what they can bring together. One rank alone that
launches slowly is a straggler. Source: PyTorch performance tuning guide, "Fuse operations" and "Use CUDA Graphs".
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.debug_settings import launches_block
from perfscope.analyzers.rules.frameworks import framework, settings_of
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling

RULE: Final = "launch-bound"
SHARE: Final = 0.05
"""Share of the step in which devices wait for launches from which the rule fires."""
LAUNCHES: Final = 20
"""Launches per step from which their sum can matter: idle time behind fewer is one slow call (an allocation, a kernel
that is compiled at its first use), which nothing here cures."""
NOISE: Final = 0.02
"""Share of the step that the replay must save: below, something else than launches sets the pace."""
OPTIMIZER_SHARE: Final = 0.25
"""Share of all kernels that the optimizer launches from which it is named first."""
FUSED: Final = ("Adam", "AdamW", "SGD", "Adagrad")
"""torch's optimizers that take ``fused=True``."""
_GRAPHS: Final = ("reduce-overhead", "max-autotune")
"""Modes of ``torch.compile`` that use CUDA graphs."""


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: launches keep up, nothing records them, or every launch was told to block."""
    waiting = facts.typical_us("idle_launch")
    if waiting < SHARE * facts.step_time_us or launches_block(facts):
        return None
    if max((row.launches_per_step for row in facts.launches), default=0.0) < LAUNCHES:
        return None
    whatif = _whatif(facts)
    played = facts.predict(whatif) if whatif and facts.predict is not None else None
    if played is not None and played.mid / 1e3 > (1 - NOISE) * facts.step_time_us:
        return None
    setting, old, new, how = _change(facts)
    return Finding(
        rule=RULE,
        title=f"Launch-bound: devices wait {waiting / facts.step_time_us:.0%} of the step for the host's next launch",
        severity=Severity.of_share(waiting / facts.step_time_us),
        evidence=_evidence(facts),
        action=Action(
            setting=setting,
            old=old,
            new=new,
            how=how,
            costs="Compilation takes minutes at the start and again for new shapes; CUDA graphs keep their memory."
            if "compile" in setting
            else None,
        ),
        confidence=Confidence.LOW if facts.few_steps else Confidence.MEDIUM,
        obtained=Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, waiting),
        whatif=whatif,
    )


def _whatif(facts: JobFacts) -> dict[str, str]:
    """Nothing where ranks are missing: what comes from them would be played as late as it was recorded."""
    alone = bool(facts.missing_ranks) or any(row.wait_is_bound for row in facts.accounting)
    return {} if alone else {"host.launch": "0"}


def _evidence(facts: JobFacts) -> tuple[Evidence, ...]:
    rows = [
        Evidence(
            what="device idle while the host launches (median)",
            value=facts.typical_us("idle_launch"),
            unit="us",
            ranks=facts.ranks,
        )
    ]
    worst = max(facts.launches, key=lambda row: row.launches_per_step)
    who = (worst.rank,)
    rows.append(Evidence(what="launches per step", value=worst.launches_per_step, unit="", ranks=who))
    if worst.short_kernels_share is not None:
        rows.append(
            Evidence(what="kernels shorter than 10 µs", value=worst.short_kernels_share, unit="share", ranks=who)
        )
    if worst.starved_share is not None:
        rows.append(
            Evidence(what="launches that found the device idle", value=worst.starved_share, unit="share", ranks=who)
        )
    share = _optimizer_share(facts)
    if share:
        rows.append(Evidence(what="kernels that the optimizer launches", value=share, unit="share", ranks=facts.ranks))
    return tuple(rows)


def _optimizer_share(facts: JobFacts) -> float:
    """Share of all kernels that are launched inside the optimizer's step; 0 where nothing marks that."""
    kernels = sum(kernel.count_per_step for kernel in facts.kernels if kernel.category == "compute")
    inside = [row.kernels_per_step for row in facts.modules if row.name.startswith(("Optimizer.step#", _OPTIMIZER))]
    return min(max(inside, default=0.0) / kernels, 1.0) if kernels else 0.0


_OPTIMIZER: Final = "perfscope::optimizer"


def _change(facts: JobFacts) -> tuple[str, str | None, str | None, str]:
    """(setting, from, to, how): the optimizer where it launches much and is not fused, else graphs of the step."""
    optimizer = settings_of(facts, "optimizer")
    classes = [name for name in optimizer.get("classes", ()) if name in FUSED]
    used = framework(facts)
    compiled = settings_of(facts, "compile")
    if _optimizer_share(facts) >= OPTIMIZER_SHARE and classes and not optimizer.get("fused"):
        how = f"torch.optim.{classes[0]}(…, fused=True): one kernel for many parameters."
        setting = f"torch.optim.{classes[0]}(fused=…)"
        if used == "transformers":
            how, setting = "--optim adamw_torch_fused", "TrainingArguments(optim=…)"
            return setting, None, "adamw_torch_fused", f"{how}\nThen: {_graphs(used, compiled)}"
        return setting, "False", "True", f"{how}\nThen: {_graphs(used, compiled)}"
    if compiled.get("mode") in _GRAPHS:
        how = (
            f"The model is compiled with mode={compiled['mode']!r} already: look for what is left outside of its "
            "graphs (TORCH_LOGS=graph_breaks,recompiles,cudagraphs). A larger batch a rank makes kernels longer."
        )
        return "torch.compile", None, None, how
    old = str(compiled.get("mode") or "default") if compiled else None
    return "torch.compile(mode=…)", old, '"reduce-overhead"', _graphs(used, compiled)


def _graphs(used: str, compiled: object) -> str:
    line = {
        "transformers": "--torch_compile True --torch_compile_mode reduce-overhead",
        "accelerate": "dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: reduce-overhead} in the file of "
        "accelerate config",
        "deepspeed": 'engine.compile(compile_kwargs={"mode": "reduce-overhead"})',
        "megatron": "--enable-cuda-graph (in newer releases --cuda-graph-impl local)",
        "lightning": 'model = torch.compile(model, mode="reduce-overhead") before trainer.fit',
    }.get(used, 'model = torch.compile(model, mode="reduce-overhead")')
    again = " in the place of its mode so far" if compiled and used in ("torch", "lightning") else ""
    return f"{line}{again}: fuses kernels and launches them as CUDA graphs. A larger batch a rank makes kernels longer."
