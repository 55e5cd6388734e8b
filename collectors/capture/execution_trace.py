"""PyTorch's execution trace of the recorded steps of a capture (``perfscope run --with execution-trace``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class ExecutionTraceRecorder:
    """Operators with shapes, tensors and process groups, written while the steps run. Use once.

    A process has one observer: where the script has its own, this one records nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        """Under a temporary name: it is whole only when the observer is unregistered."""
        self._observer: Any = None
        self._ended = False

    def begin(self) -> None:
        """Start to record. Raises RuntimeError where the script's own observer is registered, and what torch raises."""
        if self._observer is not None:
            return
        from torch.profiler import ExecutionTraceObserver

        observer = ExecutionTraceObserver()
        observer.register_callback(str(self._path))
        if not getattr(observer, "_registered", True):
            raise RuntimeError("the script has registered an execution-trace observer of its own")
        self._observer = observer
        observer.start()

    def end(self) -> None:
        """Stop, and complete the file."""
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.unregister_callback()
            self._ended = True

    def take(self) -> Path | None:
        """The file; None where nothing was recorded."""
        return self._path if self._ended and self._path.exists() else None

    def forget(self) -> None:
        """In a forked child: the observer is the parent's, and must not complete the parent's file."""
        observer, self._observer = self._observer, None
        if observer is not None:
            observer._registered = observer._execution_trace_running = False
