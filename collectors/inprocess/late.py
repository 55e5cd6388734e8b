"""Hooks what the program has made before a recording is started: optimizers, engines, process groups.

Models, loaders and wrappers need none: a capture finds them among the live objects, whenever they were made.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

from perfscope.collectors.capture import attach
from perfscope.collectors.capture.attach import Edges, counted_step
from perfscope.collectors.capture.session import Collector
from perfscope.collectors.discovery import subclasses
from perfscope.collectors.launch.bootstrap import WATCHED, Watch, wait_for_backwards, wait_for_fetchers
from perfscope.collectors.phases.fetching import time_fetches


def hook(collector: Collector) -> None:
    """Count the steps of all optimizers and engines, those that are there and those to come. Called once a process."""
    if "torch" in sys.modules:
        _hook_torch(collector)
    later: dict[str, Callable[[], None]] = {}
    for module, name in WATCHED.items():
        if module == "torch":
            call = functools.partial(_hook_torch, collector)
        else:
            call = functools.partial(getattr(attach, name), "")
        if module not in sys.modules:
            later[module] = functools.partial(_guarded, collector, module, call)
        elif module != "torch":
            _guarded(collector, module, call)
    if later:
        sys.meta_path.insert(0, Watch(later, lambda call: call()))


def _guarded(collector: Collector, module: str, call: Callable[[], None]) -> None:
    collector.problems.guard(f"counting the steps of {module}", call)


def _hook_torch(collector: Collector) -> None:
    torch: Any = sys.modules["torch"]
    edges = attach.hook_torch(collector)
    wait_for_fetchers(functools.partial(time_fetches, ""))
    kinds = list(_made(torch.optim.Optimizer))
    if not kinds:
        wait_for_backwards(functools.partial(_count_backwards, collector))
    for kind in kinds:
        step = vars(kind).get("step")
        if getattr(step, "hooked", False):
            setattr(kind, "step", torch._disable_dynamo(counted_step(edges, step), recursive=False))  # noqa: B010
    if kinds:
        for optimizer in _replaced(torch.optim.Optimizer):
            _hook_object(edges, optimizer)


def _count_backwards(collector: Collector, passes: Sequence[bool]) -> None:
    """Some backward passes have ended: without an optimizer, they were steps, and so are the further ones."""
    if next(_made(sys.modules["torch"].optim.Optimizer), None) is None:
        collector.problems.guard("counting backward passes", attach.count_backwards, collector, passes)


def _made(base: type[Any]) -> Iterator[type[Any]]:
    """Classes of optimizers of which one has been made."""
    return (kind for kind in subclasses(base) if getattr(vars(kind).get("step"), "hooked", False))


def _replaced(base: type[Any]) -> list[Any]:
    """Optimizers that have a ``step`` of their own, which holds that of their class: schedulers give them one."""
    return [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), base) and "step" in getattr(thing, "__dict__", ())
    ]


def _hook_object(edges: Edges, optimizer: Any) -> None:
    step = vars(optimizer)["step"]
    count = counted_step(edges, lambda _optimizer, *args, **kwargs: step(*args, **kwargs))
    if isinstance(step, MethodType):

        @functools.wraps(step.__func__)
        def method(this: Any, *args: Any, **kwargs: Any) -> Any:
            return count(this, *args, **kwargs)

        optimizer.step = MethodType(method, optimizer)
        return
    held = weakref.ref(optimizer)

    @functools.wraps(step)
    def function(*args: Any, **kwargs: Any) -> Any:
        return count(held(), *args, **kwargs)

    optimizer.step = function
