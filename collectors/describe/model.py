"""Describes the model that the optimizer trains."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from perfscope.collectors.discovery import INNER, JobObjects, is_compiled
from perfscope.recording.metadata import ModelMetadata

_MOST_SIZES: Final = 20_000
"""More parameters than this are not listed one by one: the metadata stays a small file."""


def describe_model(objects: JobObjects) -> ModelMetadata | None:
    """The model as this rank holds it; None where none was found. Several roots (a GAN's two) are added up."""
    if not objects.roots:
        return None
    parameters = {id(each): each for root in objects.roots for each in root.parameters()}.values()
    largest = max(objects.roots, key=lambda root: sum(_elements(each) for each in root.parameters()))
    trainable = [each for each in parameters if each.requires_grad]
    return ModelMetadata(
        name=_unsharded_name(unwrap(largest)),
        parameters=sum(map(_elements, parameters)),
        parameter_bytes=_bytes(parameters),
        trainable_bytes=_bytes(trainable),
        trainable_sizes=tuple(_bytes([each]) for each in trainable) if len(trainable) <= _MOST_SIZES else (),
        block_sizes=_block_sizes(largest),
        dtypes=tuple(sorted({str(each.dtype).removeprefix("torch.") for each in parameters})),
        compiled=any(map(is_compiled, objects.modules)),
    )


def _block_sizes(root: Any) -> tuple[int, ...]:
    """Bytes of the trainable parameters of each module of the list (or sequence) that holds most of the model, where
    all its modules are of one class: what strategies that shard by units wrap.
    """
    import torch

    largest: tuple[int, ...] = ()
    for module in root.modules():
        children = list(module.children()) if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) else []
        if len(children) > 1 and len({type(child) for child in children}) == 1:
            sizes = tuple(_bytes(each for each in child.parameters() if each.requires_grad) for child in children)
            largest = max(largest, sizes, key=sum)
    return largest


def unwrap(module: Any) -> Any:
    """The module inside its wrappers."""
    import torch

    wrapper_names = {"DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule", "DataParallel"}
    while True:
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if not kinds & (wrapper_names | {"DeepSpeedEngine", "_FabricModule"}):
            return module
        inner = next((module._modules[name] for name in INNER if name in module._modules), None)
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


def _unsharded_name(module: Any) -> str:
    """Class of the module; ``fully_shard`` and ``replicate`` put a class of their own in front of it."""
    kind = type(module)
    if len(kind.__bases__) > 1 and any(base.__name__ in ("FSDPModule", "ReplicateModule") for base in kind.__bases__):
        kind = kind.__bases__[-1]
    return str(kind.__name__)


def _local(parameter: Any) -> Any:
    """The part of a parameter that this rank holds: of a DTensor its shard, of a ZeRO-3 parameter its partition."""
    partition = getattr(parameter, "ds_tensor", None)
    if partition is not None:
        return partition
    return getattr(parameter, "_local_tensor", parameter)


def _elements(parameter: Any) -> int:
    return int(_local(parameter).numel())


def _bytes(parameters: Iterable[Any]) -> int:
    return sum(_elements(each) * int(_local(each).element_size()) for each in parameters)
