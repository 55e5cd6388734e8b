"""Makes the script's ``DistributedDataParallel`` with other values: buckets, their view, static graph, bf16 hook."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from perfscope.collectors.overrides.log import Log
from perfscope.collectors.overrides.no_sync import withhold_gradients
from perfscope.collectors.patches import Patches

ARGUMENTS: Final = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters")
"""Of the constructor. None changes a gradient by more than the order in which ranks are summed."""

DEFAULT_BUCKET_MB: Final = 25


def override_ddp(values: Mapping[str, Any], microbatches: int, patches: Patches, log: Log) -> None:
    """Every DDP made from now on takes the values; one that cannot be made so is made as the script has it."""
    from torch.nn.parallel import DistributedDataParallel

    original: Callable[..., None] = DistributedDataParallel.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it stands in for that very method
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:  # the script's own mistake, which torch reports
            return original(self, *args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        changes = {name: values[name] for name in ARGUMENTS if name in values and given.get(name) != values[name]}
        if not changes or not _made(original, bound, changes, given, log):
            original(self, *args, **kwargs)
        _add_hooks(self, values, microbatches, patches, log)
        return None

    patches.set(DistributedDataParallel, "__init__", __init__)


def _made(
    original: Any, bound: inspect.BoundArguments, changes: Mapping[str, Any], given: Mapping[str, Any], log: Log
) -> bool:
    bound.arguments.update(changes)
    try:
        original(*bound.args, **bound.kwargs)
    except Exception as error:
        for name in changes:
            log.refused(f"ddp.{name}", f"DistributedDataParallel rejects it: {error}")
        return False
    for name, value in changes.items():
        old = given.get(name)
        log.replaced(f"ddp.{name}", DEFAULT_BUCKET_MB if name == "bucket_cap_mb" and old is None else old, value)
    return True


def _add_hooks(module: Any, values: Mapping[str, Any], microbatches: int, patches: Patches, log: Log) -> None:
    """What is no argument; it fails without harm."""
    for name, add in (("comm_dtype", _compress_later), ("no_sync", withhold_gradients)):
        if not values.get(name):
            continue
        try:
            add(module, microbatches, patches, log)
        except Exception as error:
            log.refused(f"ddp.{name}", f"{type(error).__name__}: {error}")


def _compress_later(module: Any, _microbatches: int, _patches: Patches, log: Log) -> None:
    """Register the bf16 communication hook before the first forward, unless the script has one of its own by then.

    A second one raises, so ours must not be there when the script registers its own.
    """

    def before_forward(*_: Any) -> None:
        handle.remove()
        if getattr(module, "_comm_hooks", None):
            log.refused("ddp.comm_dtype", "the script registers a communication hook of its own")
            return
        try:
            module.register_comm_hook(None, _hook_for(module))
        except Exception as error:
            log.refused("ddp.comm_dtype", f"{type(error).__name__}: {error}")
        else:
            log.replaced("ddp.comm_dtype", None, "bf16")

    handle = module.register_forward_pre_hook(before_forward)


def _hook_for(module: Any) -> Any:
    """The hook of torch; under another name where the backend is not NCCL, because DDP would refuse it."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    if "nccl" in str(dist.get_backend(module.process_group)):
        return bf16_compress_hook

    def half_the_bytes(state: Any, bucket: Any) -> Any:
        return bf16_compress_hook(state, bucket)

    half_the_bytes.__annotations__ = {}  # DDP compares them with types, and these are strings
    return half_the_bytes
