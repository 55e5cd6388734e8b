"""Which framework runs the job, so that a rule can write its setting as that framework's users do."""

from __future__ import annotations

from typing import Any, Final

from perfscope.analyzers.facts import JobFacts

TORCH: Final = "torch"
"""Plain torch, and whatever is not known."""

_IN_ORDER: Final = ("megatron", "transformers", "lightning", "accelerate", "deepspeed")
"""Keys of ``RunMetadata.settings``, the framework whose arguments the user types first: Transformers drives Accelerate,
which drives DeepSpeed."""


def framework(facts: JobFacts) -> str:
    """``megatron``, ``transformers``, ``lightning``, ``accelerate``, ``deepspeed`` or ``torch``."""
    return next((name for name in _IN_ORDER if settings_of(facts, name)), TORCH)


def settings_of(facts: JobFacts, subject: str) -> dict[str, Any]:
    """Recorded settings of one subject, of the lowest rank that has any; empty without."""
    return next((run.settings[subject] for _, run in sorted(facts.runs.items()) if run.settings.get(subject)), {})


def deepspeed_config(facts: JobFacts) -> dict[str, Any]:
    """The DeepSpeed JSON in use; empty without DeepSpeed."""
    config = settings_of(facts, "deepspeed").get("config")
    return config if isinstance(config, dict) else {}


def environment(facts: JobFacts) -> dict[str, dict[str, tuple[int, ...]]]:
    """Recorded variables: name -> value -> ranks that have it."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for rank, run in sorted(facts.runs.items()):
        for name, value in run.environment.items():
            ranks = found.setdefault(name, {})
            ranks[value] = (*ranks.get(value, ()), rank)
    return found
