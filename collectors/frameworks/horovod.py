"""Horovod: its collectives, where a rank waits for them, and its optimizer's settings.

Horovod carries collectives out on a thread of its own, of which a profiler sees nothing. What is seen here is when the
training issues one and when it waits for the end. Its Timeline has the rest; ``perfscope analyze`` reads it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from perfscope.collectors.frameworks.hooks import Hooks, RangedFunction, range_collectives
from perfscope.recording.vocabulary import COLLECTIVE_PREFIX, COMMUNICATION, REDUCE

COLLECTIVES: Final = (
    "allgather", "allgather_object", "allreduce", "allreduce_", "alltoall", "barrier", "broadcast", "broadcast_",
    "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "grouped_allgather", "grouped_allreduce",
    "grouped_allreduce_", "grouped_reducescatter", "join", "reducescatter",
)  # fmt: skip
"""Functions of ``horovod.torch`` that return when the collective has ended."""

_ISSUING: Final = {
    "_allgather_async": "all_gather",
    "_allreduce_async": "all_reduce",
    "_alltoall_async": "all_to_all",
    "_broadcast_async": "broadcast",
    "_grouped_allgather_async": "all_gather",
    "_grouped_allreduce_async": "all_reduce",
    "_grouped_reducescatter_async": "reduce_scatter",
    "_reducescatter_async": "reduce_scatter",
}
"""Functions of ``horovod.torch.mpi_ops`` that everything else issues a collective with -> what it is."""

# The optimizers of the job are of classes made on the fly; they find this function in the module.
PHASES: Final = (RangedFunction("horovod.torch.optimizer", "", "synchronize", REDUCE),)

_OPTIMIZER: Final = ("backward_passes_per_step", "gradient_predivide_factor", "num_groups")
_OPERATIONS: Final = ("Average", "Sum", "Adasum", "Min", "Max", "Product")


def install(hooks: Hooks) -> None:
    """Give the collectives and the waits for them their ranges."""
    operations = sys.modules.get("horovod.torch.mpi_ops")
    if operations is None:
        return
    range_collectives(hooks, sys.modules["horovod.torch"], COLLECTIVES, COMMUNICATION)
    issued = _Issued(hooks)
    for name, kind in _ISSUING.items():
        original = vars(operations).get(name)
        if original is not None:
            hooks.patches.set(operations, name, issued.issuing(original, kind))
    for module in (operations, sys.modules.get("horovod.torch.optimizer")):
        if module is not None:
            hooks.patches.set(module, "synchronize", issued.waiting(vars(module)["synchronize"]))


class _Issued:
    """Collectives of the CPU that have been issued and not yet waited for. A device's show in its own kernels."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._kinds: dict[int, str] = {}
        self._count: Counter[str] = Counter()

    def issuing(self, original: Any, kind: str) -> Any:
        """``original`` in a range that describes the collective, as those of ``torch.distributed`` have one."""

        def begin(tensors: Any, *arguments: Any, **named: Any) -> Any:
            tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
            if any(tensor.device.type != "cpu" for tensor in tensors):
                return None
            group, size = _process_set([*arguments, *named.values()])
            sequence = self._count[group]
            self._count[group] += 1
            length = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            length *= size if kind == "all_gather" else 1  # the larger buffer
            dtype = str(tensors[0].dtype).removeprefix("torch.")
            name = f"{COLLECTIVE_PREFIX}{kind}|{group}|{size}|{sequence}||{dtype}|{length}"
            return self._hooks.annotator.begin(name), kind

        def end(record: Any, handle: Any) -> None:
            self._hooks.annotator.end(record[0])
            if isinstance(handle, int):
                self._kinds[handle] = record[1]

        return self._hooks.ranged(original, begin, end)

    def waiting(self, original: Any) -> Any:
        """``synchronize``, in the range that Horovod's Timeline has for such a collective."""

        def begin(handle: Any, *_: Any, **__: Any) -> Any:
            kind = self._kinds.pop(handle, None)
            return None if kind is None else self._hooks.annotator.begin(kind.replace("_", "").upper())

        return self._hooks.ranged(original, begin)


def _process_set(arguments: Iterable[Any]) -> tuple[str, int]:
    """Name and size of the process set among a collective's arguments; the world's without one."""
    for each in arguments:
        number = getattr(each, "process_set_id", None)
        if number:
            return f"horovod-{number}", int(each.size())
    horovod: Any = sys.modules["horovod.torch"]
    return "horovod", int(horovod.size())


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
            if isinstance(value, (int, float)):
                settings[name] = value
        settings["optimizer"] = type(distributed[0]).__name__
        settings["compression"] = getattr(held.get("_compression"), "__name__", None)
        operations = {getattr(horovod, name, None): name for name in _OPERATIONS}
        settings["op"] = operations.get(held.get("op"))
    if settings["size"] == 1:
        return [], {"horovod": settings}
    return ["ddp"], {"horovod": settings, "ddp": {"implementation": "horovod"}}
