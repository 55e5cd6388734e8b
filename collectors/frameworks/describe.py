"""What frameworks in use say of themselves: strategies, and settings under their own names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from perfscope.collectors.discovery import Found
from perfscope.collectors.frameworks import accelerate, deepspeed, horovod, lightning, megatron, transformers
from perfscope.collectors.problems import Problems

Settings = dict[str, dict[str, Any]]


def describe_frameworks(
    found: Found, optimizers: Iterable[Any], observed: dict[str, Any], problems: Problems
) -> tuple[list[str], Settings]:
    """Strategies that frameworks carry out themselves, and the settings of each framework and strategy.

    A framework that cannot be described is left out, and said.
    """
    optimizers = list(optimizers)
    names: list[str] = []
    settings: Settings = {}
    for framework, call in (
        ("deepspeed", lambda: deepspeed.describe(found)),
        ("megatron", lambda: megatron.describe(found, optimizers, observed)),
        ("horovod", lambda: horovod.describe(optimizers)),
    ):
        described = problems.guard(f"describing {framework}", call)
        if described is not None:
            names.extend(described[0])
            settings.update(described[1])
    for trainer in (accelerate, transformers, lightning):
        framework = trainer.__name__.rpartition(".")[2]
        held = problems.guard(f"describing {framework}", trainer.describe, found)
        if held is not None:
            settings[framework] = held
    autocast = problems.guard("describing accelerate's autocast", accelerate.autocast_dtype, found)
    if autocast:
        settings["amp"] = {"dtype": autocast}
    return names, settings
