"""How an argument of DistributedDataParallel is written in the framework that makes it."""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.frameworks import framework, settings_of

_TRANSFORMERS: Final = ("bucket_cap_mb", "find_unused_parameters", "static_graph")
"""Arguments that TrainingArguments has, with ``ddp_`` in front."""


def written(facts: JobFacts, **values: object) -> str:
    """What to type for DDP's arguments, such as ``written(facts, static_graph=True)``."""
    listed = ", ".join(f"{name}={value}" for name, value in values.items())
    used = framework(facts)
    if used == "transformers" and all(name in _TRANSFORMERS for name in values):
        return f"TrainingArguments({', '.join(f'ddp_{name}={value}' for name, value in values.items())})"
    if used == "transformers":
        return trainer_ddp(listed)
    if used == "accelerate":
        return f"Accelerator(kwargs_handlers=[DistributedDataParallelKwargs({listed})])"
    if used == "lightning":
        return f"Trainer(strategy=DDPStrategy({listed}))"
    return f"DistributedDataParallel(model, …, {listed})"


def trainer_ddp(arguments: str) -> str:
    """What to type for arguments that ``TrainingArguments`` has not: the Trainer makes its own Accelerator."""
    handler = f"DistributedDataParallelKwargs({arguments})"
    return f"trainer.accelerator.ddp_handler = {handler} before trainer.train() (in Transformers 4: in _wrap_model)"


def setting(facts: JobFacts, name: str) -> object:
    """What the run recorded of one argument; None where it did not."""
    return settings_of(facts, "ddp").get(name)
