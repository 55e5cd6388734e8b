"""Times the stages of every step of a run with two looks at the clock each: data loading, forward, backward, optimizer.

Only the training thread's time counts, and each stage only its own: what runs inside another (an optimizer within the
backward, a closure's forward within the optimizer) is taken out of the outer one, so the stages never exceed the step.
What a collective takes is in the stage that waits for it; times of its own would need every function of
``torch.distributed`` replaced for the whole run, which compiled code does not bear.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Final

from perfscope.collectors.forwards import watch_forwards
from perfscope.collectors.loaders import LoaderUses, first_shape
from perfscope.collectors.patches import Patches
from perfscope.collectors.problems import Problems
from perfscope.history import STAGES

DATALOADER: Final = STAGES.index("dataloader")
FORWARD: Final = STAGES.index("forward")
BACKWARD: Final = STAGES.index("backward")
OPTIMIZER: Final = STAGES.index("optimizer")

BATCHES_DESCRIBED: Final = 32
"""Draws after which the loaders are no longer looked at."""

Call = Callable[..., Any]


class Stages:
    """The stages of one process's steps. Made on the training thread."""

    def __init__(self, problems: Problems) -> None:
        import torch.compiler

        self._problems = problems
        self._is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)
        self._thread = get_ident()
        self._patches = Patches()
        self._module_patches = Patches()
        self._handles: list[Any] = []
        self._totals = [0] * len(STAGES)
        self._open: list[tuple[int, int]] = []
        """Stages under way: which, and when it began; innermost last."""
        self._inner = 0
        """Time of stages that have ended within the innermost one under way."""
        self._outer: list[int] = []
        """``_inner`` of each one further out."""
        self._drawn = 0
        self.loaders = LoaderUses()
        """The data loaders that the first batches came from."""
        self.batch_shape: tuple[int, ...] | None = None
        """Shape of the first tensor of the first batch."""
        self.measured = frozenset({"optimizer"})
        """Stages that are measured."""

    def begin(self, stage: int) -> None:
        """A stage begins on this thread."""
        self._outer.append(self._inner)
        self._inner = 0
        self._open.append((stage, perf_counter_ns()))

    def end(self, stage: int) -> None:
        """It has ended. Stages within it that never ended, because an exception went through them, end with it."""
        now = perf_counter_ns()
        while self._open:
            innermost, began = self._open.pop()
            self._totals[innermost] += now - began - self._inner
            self._inner = self._outer.pop() + now - began
            if innermost == stage:
                return

    def take(self) -> tuple[int, ...]:
        """The times since the last call, ns, in the order of ``STAGES``. Called between steps, outside any stage."""
        taken = tuple(self._totals)
        self._totals[:] = (0,) * len(STAGES)
        self._open.clear()
        self._outer.clear()
        self._inner = 0
        return taken

    def install(self, modules: Iterable[Any]) -> None:
        """Time data loading, backward and the calls of ``modules`` until :meth:`remove`."""
        self._problems.guard("timing data loading", self._patch_loader)
        self._problems.guard("timing the backward", self._patch_autograd)
        self.rehook(modules)
        self.measured = frozenset(STAGES)

    def rehook(self, modules: Iterable[Any]) -> None:
        """Time the calls of these modules instead of those before."""
        self._unhook()
        self._problems.guard("timing the forward", self._hook, list(modules))

    def remove(self) -> None:
        """Put everything back."""
        self._unhook()
        self._patches.restore()

    def _begin(self, stage: int) -> None:
        self._problems.guard("timing the stages", self.begin, stage)

    def _end(self, stage: int) -> None:
        self._problems.guard("timing the stages", self.end, stage)

    def _patch_autograd(self) -> None:
        import torch.autograd

        self._patches.set(torch.autograd, "backward", self._timed(torch.autograd.backward, BACKWARD))

    def _patch_loader(self) -> None:
        from torch.utils.data import dataloader

        iterator: Any = dataloader._BaseDataLoaderIter
        self._patches.set(iterator, "__next__", self._drawing(self._timed(iterator.__next__, DATALOADER)))

    def _timed(self, original: Call, stage: int) -> Call:
        is_compiling, thread, begin, end = self._is_compiling, self._thread, self._begin, self._end

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or get_ident() != thread:
                return original(*args, **kwargs)
            begin(stage)
            try:
                return original(*args, **kwargs)
            finally:
                end(stage)

        return timed

    def _drawing(self, draw: Call) -> Call:
        """``draw``, which also describes the loaders while they are new."""

        @functools.wraps(draw)
        def drawn(iterator: Any) -> Any:
            batch = draw(iterator)
            if self._drawn < BATCHES_DESCRIBED:
                self._drawn += 1
                self._problems.guard("describing the data loader", self._describe, iterator, batch)
            return batch

        return drawn

    def _describe(self, iterator: Any, batch: Any) -> None:
        self.loaders.drew(iterator)
        if self.batch_shape is None:
            self.batch_shape = first_shape(batch)

    def _hook(self, modules: list[Any]) -> None:
        self._handles += watch_forwards(
            modules,
            self._forward_begins,
            self._forward_ended,
            self._module_patches,
            lambda _module, compiled: self._timed(compiled, FORWARD),
        )

    def _unhook(self) -> None:
        self._module_patches.restore()
        while self._handles:
            self._handles.pop().remove()

    def _forward_begins(self, module: Any, args: Any) -> None:
        if not self._is_compiling() and get_ident() == self._thread:
            self._begin(FORWARD)

    def _forward_ended(self, module: Any, args: Any, output: Any) -> None:
        if not self._is_compiling() and get_ident() == self._thread:
            self._end(FORWARD)
