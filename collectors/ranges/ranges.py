"""Profiler ranges for the phases of a step, communication and checkpoints, while a capture runs and no longer.

Phases come from :mod:`perfscope.collectors.phases.phases`, what else gets a range from
:mod:`perfscope.collectors.frameworks`: it is replaced when a capture starts and the original again when that ends. What
a replacement does beside calling the original cannot fail into the training: an error switches that kind of range off.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from perfscope.collectors.annotate import Annotator
from perfscope.collectors.device import device_types
from perfscope.collectors.frameworks.frameworks import FrameworkRanges
from perfscope.collectors.phases.clock import evaluates
from perfscope.collectors.phases.phases import ALL, StepPhases
from perfscope.collectors.problems import Problems
from perfscope.collectors.ranges.accumulation import Accumulation
from perfscope.collectors.ranges.collectives import CollectiveRanges
from perfscope.recording.vocabulary import BACKWARD, DATALOADER, EVALUATION, FORWARD, NO_GRADIENTS, OPTIMIZER

_DATALOADER, _FORWARD, _BACKWARD, _OPTIMIZER = ALL

NAMES: Final = {_DATALOADER: DATALOADER, _FORWARD: FORWARD, _BACKWARD: BACKWARD, _OPTIMIZER: OPTIMIZER}
"""Phase -> its range."""

Call = Callable[..., Any]


class _Open(NamedTuple):
    """A phase under way."""

    phase: int
    record: Any
    """The annotator's; None without a range."""
    outermost: bool
    """Not inside another range of its name, which a framework may have opened."""


class Ranges:
    """The ranges of one process; installed for each capture."""

    what = "the ranges of phases"

    def __init__(self, phases: StepPhases, annotator: Annotator, problems: Problems) -> None:
        import torch.compiler

        self._phases = phases
        self._annotator = annotator
        self._problems = problems
        self._is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)
        self._collectives = CollectiveRanges(annotator, problems)
        self.frameworks = FrameworkRanges(annotator, problems)
        """The ranges of what training frameworks do by themselves."""
        self._active = False
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._depth = threading.local()
        self._open: list[_Open] = []
        """Phases under way, innermost last."""
        self.calls: Counter[str] = Counter()
        """Outermost ranges entered since they were installed, by name."""
        self.accumulation = Accumulation()
        """Backwards in a row, and whether their gradients were exchanged."""
        self._trains = False
        """A forward with gradients was seen, outside a backward: a checkpointed model's only one has none."""
        self.autocast: str = ""
        """Type that a forward ran in under autocast; empty without."""
        self.loaders = phases.loaders
        """The data loaders that batches came from."""

    def install(self, modules: Iterable[Any]) -> None:
        """Begin to write ranges; forward ranges on calls of ``modules`` that are not inside another of them."""
        self._thread = threading.get_ident()
        self.calls.clear()
        self.accumulation = Accumulation()
        self._active = True
        modules = list(modules)
        self._phases.attach(self)
        self._phases.patch(modules)
        if not device_types(modules):
            self._problems.guard("describing collectives", self._collectives.install)
        self.frameworks.install(self._on_training_thread, self._around)

    def remove(self) -> None:
        """Stop writing ranges and put everything back."""
        self._active = False
        self._phases.detach(self)
        self.loaders.pause()
        self.frameworks.remove()
        self._problems.guard("restoring collectives", self._collectives.remove)
        while self._open:
            self._close_innermost()

    def forget(self) -> None:
        """Write nothing more, in a forked child: ranges are its parent's business."""
        self._open.clear()
        self.frameworks.forget()
        self.remove()

    def begin(self, phase: int, subject: Any) -> None:
        """Open the range of a phase; ``subject``: the module of a forward."""
        if not self._on_training_thread():
            return
        name = NAMES[phase]
        outermost = not getattr(self._depth, name, False)
        record = None
        if outermost:
            setattr(self._depth, name, True)
            if phase == _OPTIMIZER:
                self.accumulation.optimizer_begins()
            record = self._problems.guard(f"the range {name}", self._begin_outermost, phase, subject)
        elif phase == _FORWARD and not self.autocast:  # what wraps the model may have turned it on
            self._problems.guard("reading autocast", self._look_at_autocast)
        self._open.append(_Open(phase, record, outermost))

    def end(self, phase: int) -> None:
        """Close the range of the innermost ``phase``, and those within it that never ended."""
        while self._on_training_thread() and any(each.phase == phase for each in self._open):
            if self._close_innermost() == phase:
                return

    def _on_training_thread(self) -> bool:
        return self._active and threading.get_ident() == self._thread and os.getpid() == self._pid

    def _begin(self, name: str) -> Any:
        self.calls[name] += 1
        if name == BACKWARD:
            self.accumulation.backward_begins()
        return self._annotator.begin(name)

    def _end(self, record: Any) -> None:
        if record is not None:
            self._problems.guard("closing a range", self._annotator.end, record)

    def _begin_outermost(self, phase: int, subject: Any) -> Any:
        if phase == _FORWARD:
            return self._begin_forward(subject)
        record = self._begin(NAMES[phase])
        if phase == _DATALOADER:
            self.loaders.draw_begins()
        return record

    def _close_innermost(self) -> int:
        """Close the range of the innermost phase under way; which phase that was."""
        phase, record, outermost = self._open.pop()
        if outermost:
            setattr(self._depth, NAMES[phase], False)
            if phase == _DATALOADER:
                self.loaders.draw_ended()
            elif phase == _OPTIMIZER:
                self.accumulation.optimizer_ends()
        self._end(record)
        return phase

    def _around(self, original: Call, name: str, anywhere: bool) -> Call:
        """``original`` within the range ``name`` where not already inside it on the same thread: the training thread,
        or ``anywhere`` on any.
        """
        is_compiling, depth = self._is_compiling, self._depth
        wanted: Callable[[], bool] = (lambda: self._active) if anywhere else self._on_training_thread

        @functools.wraps(original)
        def ranged(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not wanted() or getattr(depth, name, False):
                return original(*args, **kwargs)
            setattr(depth, name, True)
            record = self._problems.guard(f"the range {name}", self._begin, name)
            try:
                return original(*args, **kwargs)
            finally:
                self._end(record)
                setattr(depth, name, False)

        return ranged

    def _begin_forward(self, module: Any) -> Any:
        import torch

        training = torch.is_grad_enabled() or not evaluates(module)
        self.loaders.forward_begins(training=training)
        if not training:
            # A framework's whole evaluation may have its range already.
            return None if getattr(self._depth, EVALUATION, False) else self._begin(EVALUATION)
        if not torch.is_grad_enabled() and self._trains and not getattr(self._depth, BACKWARD, False):
            return self._begin(NO_GRADIENTS)
        self._trains |= torch.is_grad_enabled() and not getattr(self._depth, BACKWARD, False)
        self.accumulation.forward_begins(module)
        if not self.autocast:
            self._look_at_autocast()
        return self._begin(FORWARD)

    def _look_at_autocast(self) -> None:
        import torch

        if torch.is_autocast_enabled():
            self.autocast = str(torch.get_autocast_gpu_dtype())
        elif torch.is_autocast_cpu_enabled():
            self.autocast = str(torch.get_autocast_cpu_dtype())
