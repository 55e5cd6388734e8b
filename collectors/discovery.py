"""Finds the job's models, wrappers and profilers once, among the objects that the garbage collector knows.

Nothing of the training has to be patched for it, and objects made before the collector came are found too. Other
threads may be making theirs meanwhile: one without any attribute yet is none, and a model that changes while it is
looked at is not the one that has just been trained.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

_OPTIMIZED: Final = ("torch._dynamo.eval_frame", "OptimizedModule")
"""What ``torch.compile`` makes of a module."""

_WRAPPERS: Final = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
    _OPTIMIZED,
    ("deepspeed.runtime.engine", "DeepSpeedEngine"),
    ("lightning.fabric.wrappers", "_FabricModule"),
    ("lightning_fabric.wrappers", "_FabricModule"),
)
"""Modules around a module: their forward is the model's forward."""

INNER: Final = ("module", "_orig_mod", "_fsdp_wrapped_module", "_forward_module")
"""Where wrappers keep the module that they wrap."""

_PIPELINED: Final = (("deepspeed.runtime.pipe.engine", "PipelineEngine"),)

_LISTED: Final = {
    "profilers": (("torch.autograd.profiler", "profile"),),
    "stages": (("torch.distributed.pipelining.stage", "_PipelineStageBase"),),
    "schedules": (("torch.distributed.pipelining.schedules", "_PipelineSchedule"),),
    "scalers": (("torch.amp.grad_scaler", "GradScaler"), ("torch.cuda.amp.grad_scaler", "GradScaler")),
    "meshes": (("torch.distributed.device_mesh", "DeviceMesh"), ("torch.distributed._tensor", "DeviceMesh")),
    "compiled": (("torch._dynamo.eval_frame", "OptimizeContext"),),
    "trainers": (
        ("accelerate.accelerator", "Accelerator"),
        ("transformers.trainer", "Trainer"),
        ("lightning.pytorch.trainer.trainer", "Trainer"),
        ("pytorch_lightning.trainer.trainer", "Trainer"),
        ("lightning.fabric.fabric", "Fabric"),
        ("lightning_fabric.fabric", "Fabric"),
    ),
}
"""Field of :class:`JobObjects` -> the classes whose objects it lists."""

_SHARDED: Final = (
    ("torch.distributed.fsdp._fully_shard._fully_shard", "FSDPModule"),
    ("torch.distributed._composable.fsdp.fully_shard", "FSDPModule"),
)
"""What ``fully_shard`` makes of a module, in newer and older versions of torch."""


@dataclass
class JobObjects:
    """What the job holds. Lists hold the objects themselves: drop it after use."""

    roots: list[Any] = field(default_factory=list)
    """Outermost modules that hold parameters of the optimizers."""
    modules: list[Any] = field(default_factory=list)
    """Every module below the roots, the roots included."""
    profilers: list[Any] = field(default_factory=list)
    """``torch.autograd.profiler.profile`` objects, whoever made them."""
    stages: list[Any] = field(default_factory=list)
    """This rank's stages of ``torch.distributed.pipelining``."""
    schedules: list[Any] = field(default_factory=list)
    """What runs those stages."""
    scalers: list[Any] = field(default_factory=list)
    """``GradScaler`` objects."""
    meshes: list[Any] = field(default_factory=list)
    """``DeviceMesh`` objects, parts of others included."""
    compiled: list[Any] = field(default_factory=list)
    """What ``torch.compile`` made: of a module, a function or a method."""
    trainers: list[Any] = field(default_factory=list)
    """What runs the training in frameworks that have such an object."""

    def of(self, name: str) -> list[Any]:
        """Modules that are instances of a known class, by its name; none where its library was not imported."""
        kinds = loaded(entry for entry in (*_WRAPPERS, *_SHARDED, *_PIPELINED) if entry[1] == name)
        return [module for module in self.modules if isinstance(module, kinds)]

    def to_hook(self, called: Collection[int] = ()) -> list[Any]:
        """Modules whose outermost calls are the forward.

        The roots; what a wrapper holds, which may be called past it (as evaluation on one rank is); and the children
        of a root that may merely hold the model and never be called itself, as one whose id is in ``called`` is.
        """
        import torch

        containers = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList)
        hooked: list[Any] = []
        for root in self.roots:
            layers = _layers(root)
            hooked.extend(layers)
            if id(root) in called or len(layers) > 1 or isinstance(root, loaded(_WRAPPERS)):
                continue
            if not is_compiled(root):
                hooked.extend(child for child in root.children() if not isinstance(child, containers))
        return hooked


def loaded(classes: Iterable[tuple[str, str]]) -> tuple[type[Any], ...]:
    """The classes, given as (module, name), of modules that somebody has imported."""
    kinds = (getattr(sys.modules.get(module), name, None) for module, name in classes)
    return tuple(kind for kind in kinds if isinstance(kind, type))


def subclasses(base: type[Any]) -> Iterator[type[Any]]:
    """A class and all that are derived from it, each once."""
    waiting, seen = [base], {base}
    while waiting:
        kind = waiting.pop()
        yield kind
        for below in type.__subclasses__(kind):
            if below not in seen:
                seen.add(below)
                waiting.append(below)


def discover(optimizers: Iterable[Any]) -> JobObjects:
    """Look through every live object once. Takes a fraction of a second for millions of them."""
    import torch

    listed = {name: loaded(classes) for name, classes in _LISTED.items()}
    objects = JobObjects()
    modules_made: list[Any] = []
    wanted: dict[type[Any], tuple[list[Any], ...]] = {}
    for thing in gc.get_objects():
        kind = type(thing)  # not isinstance: a proxy's __class__ may run the script's code
        lists = wanted.get(kind)
        if lists is None:
            lists = tuple(getattr(objects, name) for name, classes in listed.items() if issubclass(kind, classes))
            if issubclass(kind, torch.nn.Module):
                lists += (modules_made,)
            wanted[kind] = lists
        if lists and getattr(thing, "__dict__", True):
            for each in lists:
                each.append(thing)
    modules = {id(module): module for module in modules_made if "_modules" in vars(module)}
    objects.roots = _roots(modules, optimizers)
    objects.modules = _modules_below(objects.roots)
    return objects


def _modules_below(roots: list[Any]) -> list[Any]:
    """The roots and all below them, each once, in the order of torch's ``modules()``."""
    seen: dict[int, Any] = {}
    waiting = roots[::-1]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in seen:
            seen[id(module)] = module
            waiting.extend(reversed(tuple(vars(module).get("_modules", {}).values())))
    return list(seen.values())


def _roots(modules: dict[int, Any], optimizers: Iterable[Any]) -> list[Any]:
    """Modules below no other module that hold what the optimizers train.

    Where no module does (an engine may give its optimizer flat copies instead), outermost wrappers, else outermost
    modules with anything to train.
    """
    below = {id(child) for module in modules.values() for child in tuple(module._modules.values())}
    outermost = [module for key, module in modules.items() if key not in below]
    trained = {
        id(parameter)
        for optimizer in optimizers
        for group in getattr(optimizer, "param_groups", ())
        for parameter in group["params"]
    }
    roots = [module for module in outermost if _any_parameter(module, lambda each: id(each) in trained)]
    if roots:
        return roots
    wrappers = loaded(_WRAPPERS)
    wrapped = [module for module in outermost if wrappers and isinstance(module, wrappers)]
    return wrapped or [module for module in outermost if _any_parameter(module, lambda each: each.requires_grad)]


def _any_parameter(module: Any, wanted: Callable[[Any], bool]) -> bool:
    """Has the module such a parameter? No, where another thread makes or changes it at the moment."""
    try:
        return any(map(wanted, module.parameters()))
    except Exception:  # its parameters() may be the script's own
        return False


def is_compiled(module: Any) -> bool:
    """Is the module itself compiled, by ``torch.compile(module)`` or ``module.compile()``?"""
    if isinstance(module, loaded((_OPTIMIZED,))):
        return True
    return vars(module).get("_compiled_call_impl") is not None


def has_compiled() -> bool:
    """Has ``torch.compile`` compiled anything in this process?"""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["frames"]["total"] > 0


def _layers(root: Any) -> list[Any]:
    """``root`` and, where it wraps a module, that module, and so on inwards, but never into compiled code."""
    layers = [root]
    wrappers = loaded(_WRAPPERS)
    while isinstance(layers[-1], wrappers) and not is_compiled(layers[-1]):
        inner = next((layers[-1]._modules[name] for name in INNER if name in layers[-1]._modules), None)
        if inner is None:
            break
        layers.append(inner)
    return layers
