"""How an argument of DistributedDataParallel is written in the framework that makes it."""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.context import RuleContext

_TRANSFORMERS: Final = ("bucket_cap_mb", "find_unused_parameters", "static_graph")
"""Arguments that TrainingArguments has, with ``ddp_`` in front."""


def written(used: str, **values: object) -> str:
    """What to type for DDP's arguments, such as ``written("lightning", static_graph=True)``: in the framework ``used``,
    plain torch where it has no way of its own.
    """
    listed = ", ".join(f"{name}={value}" for name, value in values.items())
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
    """What to type for arguments that ``TrainingArguments`` lacks: the Trainer makes its own Accelerator."""
    handler = f"DistributedDataParallelKwargs({arguments})"
    return f"trainer.accelerator.ddp_handler = {handler} before trainer.train() (in Transformers 4: in _wrap_model)"


def setting(job: RuleContext, name: str) -> object:
    """The recorded value of one argument; None where it is not recorded."""
    return job.settings("ddp").get(name)
