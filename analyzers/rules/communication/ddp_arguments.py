"""How an argument of DistributedDataParallel is written in the framework that makes it."""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.typed import call, training_arguments
from perfscope.results.findings import code

_TRANSFORMERS: Final = ("broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "static_graph")
"""Arguments that TrainingArguments has, with ``ddp_`` in front."""


def written(used: str, **values: object) -> str:
    """What to type for DDP's arguments, such as ``written("lightning", static_graph=True)``: in the framework ``used``,
    plain torch where it has no way of its own.
    """
    listed = ", ".join(f"{name}={value}" for name, value in values.items())
    if used == "transformers" and all(name in _TRANSFORMERS for name in values):
        return training_arguments(**{f"ddp_{name}": value for name, value in values.items()})
    if used == "transformers":
        return trainer_ddp(listed)
    if used == "accelerate":
        return accelerator_ddp(listed)
    if used in ("lightning", "fabric"):
        return lightning_ddp(used, listed)
    return call("model = torch.nn.parallel.DistributedDataParallel", "model", **values)


def lightning_ddp(used: str, arguments: str, before: str = "") -> str:
    """What to type for arguments of DDP with Lightning's Trainer or Fabric, after a line ``before``."""
    package, assigned = ("fabric", "fabric = Fabric") if used == "fabric" else ("pytorch", "trainer = Trainer")
    before += f"from lightning.{package}.strategies import DDPStrategy"
    return call(assigned, "", before, strategy=f"DDPStrategy({arguments})")


def accelerator_ddp(arguments: str, *imported: str) -> str:
    """What to type for arguments of DDP with Accelerate, with more that is ``imported`` from it."""
    handlers = f"[DistributedDataParallelKwargs({arguments})]"
    return call("accelerator = Accelerator", "", _import(*imported), kwargs_handlers=handlers)


def trainer_ddp(arguments: str, *imported: str) -> str:
    """What to type for arguments that ``TrainingArguments`` lacks: the Trainer makes its own Accelerator."""
    return "Before trainer.train() (in Transformers 4: in _wrap_model):\n" + code(
        "python",
        f"{_import(*imported)}\ntrainer.accelerator.ddp_handler = DistributedDataParallelKwargs({arguments})",
    )


def _import(*names: str) -> str:
    return f"from accelerate import {', '.join(sorted(('DistributedDataParallelKwargs', *names)))}"


def setting(job: RuleContext, name: str) -> object:
    """The recorded value of one argument; None where it is not recorded."""
    return job.settings("ddp").get(name)
