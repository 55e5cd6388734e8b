"""Modules whose forwards can be timed by the call of their class, which takes a tenth of the time of two hooks.

A module with any hook takes torch's long way through its call, of some 10 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from perfscope.collectors.discovery import has_compiled


class ForwardHook:
    """A hook of a module that is saved with the module as one that does nothing, wherever it is loaded."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """The forward begins or has ended."""
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """As what takes any arguments, does nothing, and is there wherever Python is."""
        return getattr, (nullcontext(), "__exit__")

    def __deepcopy__(self, _: dict[int, Any]) -> ForwardHook:
        """Copies of a module train like it."""
        return self


class QuickHook(ForwardHook):
    """The same, with what ``quick`` does where that answers True. Nothing happens while the compiler is ``tracing``."""

    def __init__(self, call: Callable[..., None], tracing: Callable[[], bool], quick: Callable[[Any], bool]) -> None:
        super().__init__(call)
        self._tracing = tracing
        self._quick = quick

    def __call__(self, module: Any, *args: Any) -> None:
        """The forward begins or has ended."""
        if not (self._tracing() or self._quick(module)):
            self._call(module, *args)


def classes(modules: Sequence[Any]) -> dict[type[Any], list[Any]]:
    """Class -> those of ``modules`` that are of it, of classes whose call can be replaced.

    Left out are classes with a call of their own, those of torch's layers, those of which other modules are, and all
    where something has been compiled, which would be compiled anew.
    """
    if has_compiled():
        return {}
    every = {id(each): each for module in modules for each in module.modules()}.values()
    found: dict[type[Any], list[Any]] = {}
    for module in modules:
        if _plain(type(module)):
            found.setdefault(type(module), []).append(module)
    return {kind: these for kind, these in found.items() if sum(isinstance(each, kind) for each in every) == len(these)}


def _plain(kind: type[Any]) -> bool:
    import torch

    layer = kind.__module__.startswith("torch.nn.modules")
    return not layer and kind.__call__ is torch.nn.Module.__call__
