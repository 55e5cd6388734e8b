"""Gets out of the way of the script's own profiler: two at once break each other in silence."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from perfscope.collectors.patches import Patches


def running(profilers: Iterable[Any]) -> list[Any]:
    """Those of the given ``torch.autograd.profiler.profile`` objects that are prepared or recording."""
    return [
        profiler
        for profiler in profilers
        if vars(profiler).get("entered") and vars(profiler).get("kineto_results") is None
    ]


class ForeignProfiler:
    """Knows whether the script's own profiler is at work."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[Any]] = []

    def remember(self, profilers: Iterable[Any]) -> bool:
        """Remember those that are at work; are there any?"""
        self._known = [weakref.ref(profiler) for profiler in running(profilers)]
        return bool(self._known)

    def at_work(self) -> bool:
        """Is a profiler recording on this thread, or one that is remembered still at work?"""
        autograd: Any = importlib.import_module("torch.autograd")
        alive = [profiler for profiler in (ref() for ref in self._known) if profiler is not None]
        return bool(autograd._profiler_enabled()) or bool(running(alive))


class ForeignStart:
    """While installed, calls ``yield_first`` before any profiler but ours prepares or starts."""

    def __init__(self, yield_first: Callable[[], None]) -> None:
        self._yield_first = yield_first
        self._patches = Patches()
        self.ours = False
        """True while this project itself operates its profiler."""

    def install(self) -> None:
        """Begin to watch."""
        from torch.autograd import profiler

        for name in ("_prepare_profiler", "_enable_profiler"):
            self._patches.set(profiler, name, self._watched(vars(profiler)[name]))

    def remove(self) -> None:
        """Stop watching and put everything back."""
        self._patches.restore()

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self.ours:
                self._yield_first()
            return original(*args, **kwargs)

        return watched
