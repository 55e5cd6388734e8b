"""Ranges for data loading, forward, backward, communication and optimizer, while a capture runs and no longer.

Names are replaced when a capture starts and are the originals again when it ends. What a replacement does beside
calling the original cannot fail into the training: an error switches that kind of range off.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

from perfscope.collectors.accumulation import Accumulation
from perfscope.collectors.annotate import Annotator
from perfscope.collectors.collectives import CollectiveRanges
from perfscope.collectors.device import device_types
from perfscope.collectors.discovery import has_compiled
from perfscope.collectors.forwards import watch_forwards
from perfscope.collectors.frameworks.ranges import FrameworkRanges
from perfscope.collectors.loaders import LoaderUses, first_shape
from perfscope.collectors.patches import Patches
from perfscope.collectors.pipelining import range_micro_batches
from perfscope.collectors.problems import Problems
from perfscope.vocabulary import BACKWARD, CHECKPOINT, COMMUNICATION, DATALOADER, EVALUATION, FORWARD, OPTIMIZER

COLLECTIVES: Final = (
    "_all_gather_base", "_reduce_scatter_base", "all_gather", "all_gather_coalesced", "all_gather_into_tensor",
    "all_gather_object", "all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object",
    "monitored_barrier", "recv", "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list",
)  # fmt: skip
"""Functions of ``torch.distributed``. Not ``isend`` and ``irecv``: ``batch_isend_irecv`` compares them by identity."""

Call = Callable[..., Any]


class Ranges:
    """The ranges of one process; installed for each capture."""

    def __init__(self, annotator: Annotator, problems: Problems) -> None:
        import torch.compiler

        self._annotator = annotator
        self._problems = problems
        self._is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)
        self._patches = Patches()
        self._collectives = CollectiveRanges(annotator, problems)
        self.frameworks = FrameworkRanges(annotator, problems)
        """The ranges of what training frameworks do by themselves."""
        self._handles: list[Any] = []
        self._active = False
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._depth = threading.local()
        self._forward: list[Any] = []
        self.backward_ended: Callable[[], None] = lambda: None
        """Called when a backward has returned and its range has been closed."""
        self.calls: Counter[str] = Counter()
        """Outermost ranges entered since they were installed, by name."""
        self.accumulation = Accumulation()
        """Backwards in a row, and whether their gradients were exchanged."""
        self.autocast: str = ""
        """Type that a forward ran in under autocast; empty without."""
        self.batch_shape: tuple[int, ...] | None = None
        """Shape of the first tensor of the first batch that came from a data loader."""
        self.loaders = LoaderUses()
        """The data loaders that batches came from."""

    @property
    def active(self) -> bool:
        """Are ranges being written?"""
        return self._active

    def install(self, modules: Iterable[Any]) -> None:
        """Begin to write ranges; forward ranges on calls of ``modules`` that are not inside another of them."""
        self._thread = threading.get_ident()
        self.calls.clear()
        self.accumulation = Accumulation()
        self._active = True
        for part in (
            self._patch_autograd,
            self._patch_loader,
            self._patch_collectives,
            self._patch_pipeline,
            self._patch_saving,
        ):
            self._problems.guard(f"the range of {part.__name__.rpartition('_')[2]}", part)
        modules = list(modules)
        self._problems.guard("the range of forward", self._hook_modules, modules)
        if not device_types(modules):
            self._problems.guard("describing collectives", self._collectives.install)
        self.frameworks.install(self._on_training_thread, self._around_phase)

    def remove(self) -> None:
        """Stop writing ranges and put everything back."""
        self._active = False
        self.loaders.pause()
        self.frameworks.remove()
        self._patches.restore()
        self._problems.guard("leaving collectives alone", self._collectives.remove)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        while self._forward:
            self._end(self._forward.pop())

    def forget(self) -> None:
        """Write nothing more, in a forked child: ranges are its parent's business."""
        self._forward.clear()
        self.frameworks.forget()
        self.remove()

    def begin_optimizer(self) -> Any:
        """Open the optimizer's range if a capture runs; hand what is returned to :meth:`end_optimizer`."""
        if not self._on_training_thread():
            return None
        self.accumulation.optimizer_begins()
        return self._begin(OPTIMIZER)

    def end_optimizer(self, record: Any) -> None:
        """Close the optimizer's range."""
        self.accumulation.optimizer_ends()
        self._annotator.end(record)

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

    def _patch_autograd(self) -> None:
        import torch.autograd

        ranged = self._around(torch.autograd.backward, BACKWARD, self._on_training_thread, self._backward_ended)
        self._patches.set(torch.autograd, "backward", ranged)

    def _patch_loader(self) -> None:
        from torch.utils.data import dataloader

        iterator: Any = dataloader._BaseDataLoaderIter
        timed = self.loaders.timed(iterator.__next__)
        replacement = self._around(timed, DATALOADER, self._on_training_thread, self._drew)
        self._patches.set(iterator, "__next__", replacement)

    def _patch_collectives(self) -> None:
        import torch.distributed

        # Compiled code that calls them would be compiled anew for the replacements.
        if not torch.distributed.is_available() or has_compiled():
            return
        for name in COLLECTIVES:
            original = vars(torch.distributed).get(name)
            if callable(original):
                # On any thread: sharded training gathers and scatters from autograd's threads.
                replacement = self._around(original, COMMUNICATION, lambda: self._active)
                self._patches.set(torch.distributed, name, replacement)

    def _patch_pipeline(self) -> None:
        range_micro_batches(self._patches, self._annotator, self._problems, self._on_training_thread)

    def _patch_saving(self) -> None:
        import torch

        self._patches.set(torch, "save", self._around(torch.save, CHECKPOINT, self._on_training_thread))

    def _around_phase(self, original: Call, name: str, anywhere: bool) -> Call:
        return self._around(original, name, (lambda: self._active) if anywhere else self._on_training_thread)

    def _around(
        self, original: Call, name: str, wanted: Callable[[], bool], then: Callable[[Any, Any], object] | None = None
    ) -> Call:
        """``original`` within the range ``name``, where ``wanted`` and not already inside it on the same thread."""
        is_compiling = self._is_compiling
        depth = self._depth

        @functools.wraps(original)
        def ranged(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not wanted() or getattr(depth, name, False):
                return original(*args, **kwargs)
            setattr(depth, name, True)
            record = self._problems.guard(f"the range {name}", self._begin, name)
            try:
                result = original(*args, **kwargs)
            finally:
                self._end(record)
                setattr(depth, name, False)
            if then is not None:
                self._problems.guard(f"what follows {name}", then, args, result)
            return result

        return ranged

    def _backward_ended(self, args: Any, result: Any) -> None:
        self.backward_ended()

    def _drew(self, args: tuple[Any, ...], batch: Any) -> None:
        self.loaders.drew(args[0], batch)
        if self.batch_shape is None:
            self.batch_shape = first_shape(batch)

    def _hook_modules(self, modules: list[Any]) -> None:
        self._handles += watch_forwards(
            modules, self._forward_begins, self._forward_ended, self._patches, self._around_forward
        )

    def _around_forward(self, module: Any, call: Call) -> Call:
        @functools.wraps(call)
        def ranged(*args: Any, **kwargs: Any) -> Any:
            self._forward_begins(module, ())
            try:
                return call(*args, **kwargs)
            finally:
                self._forward_ended(module, (), None)

        return ranged

    def _forward_begins(self, module: Any, args: Any) -> None:
        if self._is_compiling() or not self._on_training_thread():
            return
        outermost = not self._forward
        record = self._problems.guard("the range of forward", self._begin_forward, module) if outermost else None
        self._forward.append(record)
        if not (outermost or self.autocast):  # what wraps the model may have turned it on
            self._problems.guard("looking at autocast", self._look_at_autocast)

    def _forward_ended(self, module: Any, args: Any, output: Any) -> None:
        if not self._is_compiling() and self._on_training_thread() and self._forward:
            self._end(self._forward.pop())

    def _begin_forward(self, module: Any) -> Any:
        import torch

        inner = module._modules.get("module") or module  # DeepSpeed's engine puts what it holds into evaluation mode
        if not (module.training and inner.training) and not torch.is_grad_enabled():
            # A framework's whole evaluation may have its range already.
            return None if getattr(self._depth, EVALUATION, False) else self._begin(EVALUATION)
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
