"""Times what the training thread waits for other ranks, at a fraction of a microsecond for each wait.

Collectives and messages that Python waits for all end in ``Work.wait``, whoever issued them: functions of
``torch.distributed``, FSDP, pipelines' schedules, ZeRO. DistributedDataParallel waits in C++ instead, when the
backward's own work is over and its last bucket is on its way; hooks of two parameters have the autograd engine call at
that moment.

Where devices carry out collectives, hosts do not wait in them, and nothing is measured.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from perfscope.collectors.device import device_types
from perfscope.collectors.discovery import JobObjects, has_compiled
from perfscope.collectors.patches import Patches

if TYPE_CHECKING:
    from perfscope.collectors.phases.clock import PhaseClock

_BLOCKING: Final = (
    ("torch.distributed.distributed_c10d", "Work", "wait"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "_distributed_broadcast_coalesced"),
    ("torch.distributed._functional_collectives", "", "wait_tensor"),
)
"""Module, class (empty: none) and what of it returns when other ranks have come."""

_NO_BACKWARD: Final = -1
"""Torch numbers them from 0."""


class RankWaits:
    """The waits of one process; told to the clock of its phases."""

    what = "timing what the training waits for other ranks"

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self._thread = get_ident()
        self._patches = Patches()
        self._handles: list[Any] = []

    def install(self, objects: JobObjects) -> bool:
        """Begin to time waits, of these models instead of those before. False where hosts do not wait for ranks."""
        self.remove()
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return False
        if device_types(objects.roots):
            return False
        self._thread = get_ident()
        # What is compiled would be compiled anew for a function that has been replaced.
        compiled = has_compiled()
        for module, owner, name in _BLOCKING:
            place = sys.modules.get(module)
            place = getattr(place, owner, None) if owner else place
            if place is not None and name in vars(place) and not (compiled and owner == ""):
                self._patches.set(place, name, self.timed(vars(place)[name], name))
        for model in objects.of("DistributedDataParallel"):
            self._mark(model)
        return True

    def remove(self) -> None:
        """Put everything back."""
        self._patches.restore()
        while self._handles:
            self._handles.pop().remove()

    def timed(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        """``original``, and the clock told how long it took."""
        import torch.compiler

        clock, thread = self._clock, self._thread
        is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)
        inside = False

        def wait(first: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            # While a backward waits for its gradients, all its time counts already.
            if is_compiling() or inside or clock.reducing or get_ident() != thread:
                return original(first, *args, **kwargs)
            inside = True
            if clock.core is not None:
                clock.ask_core()
            began = perf_counter_ns()
            try:
                return original(first, *args, **kwargs)
            finally:
                inside = False
                clock.waited(perf_counter_ns() - began)

        # pybind11 tells a call from its own override by the function's name; a subclass of Work in Python would
        # otherwise call itself without end.
        code = wait.__code__.replace(co_name=name)
        renamed = FunctionType(code, wait.__globals__, name, None, wait.__closure__)
        renamed.__kwdefaults__ = wait.__kwdefaults__
        return functools.wraps(original)(renamed)

    def _mark(self, model: Any) -> None:
        """Have the clock told when a backward of DDP's model has computed its last gradient.

        The engine makes its calls in the order in which they were asked for, and DDP asks for its own (waiting for all
        buckets) when the last gradient is there; a parameter's own hooks run before that, of the last one, too.
        """
        import torch

        if "torch._dynamo" in sys.modules and torch._dynamo.config.compiled_autograd:
            return  # it would compile the hooks into the backward
        clock, graph_task = self._clock, torch._C._current_graph_task_id
        queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

        asked = _NO_BACKWARD
        """The backward in which the engine has been asked already."""

        def computed() -> None:
            clock.ask_core()
            clock.reducing = perf_counter_ns()

        def accumulated(_: Any) -> None:
            nonlocal asked
            clock.reducing = 0
            if (task := graph_task()) != asked:
                asked = task
                queue(computed)

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in {id(each): each for each in (*trained[:1], *trained[-1:])}.values():
            self._handles.append(parameter.register_post_accumulate_grad_hook(accumulated))
