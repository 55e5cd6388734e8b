"""Finds the job's models, wrappers and profilers once, among the objects that the garbage collector knows.

Nothing of the training has to be patched for it, and objects made before the collector came are found too.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

_WRAPPERS: Final = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
    ("torch._dynamo.eval_frame", "OptimizedModule"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine"),
)
"""Modules around a module: their forward is the model's forward."""

_PIPELINE: Final = (
    ("torch.distributed.pipelining.stage", "_PipelineStageBase"),
    ("deepspeed.runtime.pipe.engine", "PipelineEngine"),
)

_SHARDED: Final = (
    ("torch.distributed.fsdp._fully_shard._fully_shard", "FSDPModule"),
    ("torch.distributed._composable.fsdp.fully_shard", "FSDPModule"),
)
"""What ``fully_shard`` makes of a module, in newer and older versions of torch."""


@dataclass
class Found:
    """What the job holds. Lists hold the objects themselves: drop it after use."""

    roots: list[Any] = field(default_factory=list)
    """Outermost modules that hold parameters of the optimizers."""
    modules: list[Any] = field(default_factory=list)
    """Every module below the roots, the roots included."""
    profilers: list[Any] = field(default_factory=list)
    """``torch.autograd.profiler.profile`` objects, whoever made them."""
    pipeline: bool = False

    def of(self, name: str) -> list[Any]:
        """Modules that are instances of a wrapper, by its class name; none where its library was not imported."""
        kinds = loaded(entry for entry in (*_WRAPPERS, *_SHARDED) if entry[1] == name)
        return [module for module in self.modules if isinstance(module, kinds)]

    def to_hook(self) -> list[Any]:
        """Modules whose outermost calls are the forward.

        The roots, and their children where a root may merely hold the model and never be called itself.
        """
        wrappers = loaded(_WRAPPERS)
        hooked = list(self.roots)
        for root in self.roots:
            if not isinstance(root, wrappers):
                hooked.extend(child for child in root.children() if not _is_container(child))
        return hooked


def loaded(classes: Iterable[tuple[str, str]]) -> tuple[type[Any], ...]:
    """The classes, given as (module, name), of modules that somebody has imported."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in classes)
    return tuple(kind for kind in found if isinstance(kind, type))


def discover(optimizers: Iterable[Any]) -> Found:
    """Look through every live object once. Takes a fraction of a second for millions of them."""
    import torch

    profile = torch.autograd.profiler.profile
    pipeline = loaded(_PIPELINE)
    modules: dict[int, Any] = {}
    found = Found()
    for thing in gc.get_objects():
        kind = type(thing)  # not isinstance: a proxy's __class__ may run the script's code
        if issubclass(kind, torch.nn.Module):
            if "_modules" in vars(thing):
                modules[id(thing)] = thing
        elif issubclass(kind, profile):
            found.profilers.append(thing)
        if pipeline and issubclass(kind, pipeline):
            found.pipeline = True
    found.roots = _roots(modules, optimizers)
    seen = {id(module): module for root in found.roots for module in root.modules()}
    found.modules = list(seen.values())
    return found


def _roots(modules: dict[int, Any], optimizers: Iterable[Any]) -> list[Any]:
    """Modules below no other module that hold what the optimizers train.

    Where no module does (an engine may give its optimizer flat copies instead), outermost wrappers, else outermost
    modules with anything to train.
    """
    below = {id(child) for module in modules.values() for child in module._modules.values() if child is not None}
    outermost = [module for key, module in modules.items() if key not in below]
    trained = {
        id(parameter)
        for optimizer in optimizers
        for group in getattr(optimizer, "param_groups", ())
        for parameter in group["params"]
    }
    roots = [module for module in outermost if any(id(parameter) in trained for parameter in module.parameters())]
    if roots:
        return roots
    wrappers = loaded(_WRAPPERS)
    wrapped = [module for module in outermost if wrappers and isinstance(module, wrappers)]
    return wrapped or [
        module for module in outermost if any(parameter.requires_grad for parameter in module.parameters())
    ]


def _is_container(module: Any) -> bool:
    import torch

    return isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList))
