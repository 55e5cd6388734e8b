"""Horovod: ranges where a rank waits for its collectives, and its optimizer's settings."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final

from perfscope.collectors.frameworks.hooks import Hooks, Phase, range_collectives, range_phases
from perfscope.vocabulary import COMMUNICATION, REDUCE

COLLECTIVES: Final = (
    "allgather", "allgather_object", "allreduce", "allreduce_", "alltoall", "barrier", "broadcast", "broadcast_",
    "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "grouped_allreduce", "join",
    "reducescatter", "synchronize",
)  # fmt: skip
"""Functions of ``horovod.torch`` that return when the collective has ended."""

PHASES: Final = (
    # The optimizers of the job are of classes made on the fly; they find this one in the module.
    Phase("horovod.torch.optimizer", "", "synchronize", REDUCE),
)

_OPTIMIZER: Final = ("backward_passes_per_step", "gradient_predivide_factor", "num_groups", "groups")


def install(hooks: Hooks) -> None:
    """Give the collectives and the optimizer's wait for its gradients their ranges."""
    module = sys.modules.get("horovod.torch")
    if module is not None:
        range_collectives(hooks, module, COLLECTIVES, COMMUNICATION)
        range_phases(hooks, PHASES)


def describe(optimizers: Iterable[Any]) -> tuple[list[str], dict[str, dict[str, Any]]] | None:
    """Data parallelism by Horovod and its settings; None where Horovod was not set up.

    ``HOROVOD_*`` variables are in the run's environment.
    """
    horovod: Any = sys.modules.get("horovod.torch")
    if horovod is None or not horovod.is_initialized():
        return None
    settings: dict[str, Any] = {"size": int(horovod.size()), "local_size": int(horovod.local_size())}
    distributed = [each for each in optimizers if hasattr(type(each), "_allreduce_grad_async")]
    if distributed:
        held = vars(distributed[0])
        for name in _OPTIMIZER:
            value = held.get(name, held.get(f"_{name}"))
            if value is not None and not isinstance(value, (list, tuple)):
                settings[name] = value
        settings["optimizer"] = type(distributed[0]).__name__
        settings["compression"] = getattr(held.get("_compression"), "__name__", None)
        settings["op"] = getattr(held.get("op"), "__name__", None) or str(held.get("op"))
    if settings["size"] == 1:
        return [], {"horovod": settings}
    return ["ddp"], {"horovod": settings, "ddp": {"implementation": "horovod"}}
