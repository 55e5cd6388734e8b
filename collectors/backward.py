"""Puts off until a backward has returned what must not happen inside it.

Where optimizers step inside the backward, so do training steps end there: on autograd's own threads where there are
devices, and always with the profiler's state as it was when the backward began. A profiler that starts or stops in
there is lost, and writing its trace crashes the process.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from perfscope.collectors.patches import Patches

MOST: Final = 1 << 14
"""Optimizer steps that may wait: several times the parameters of a model that has an optimizer for each."""


class AfterBackward:
    """What waits for the backward under way; done by the thread that called ``torch.autograd.backward``."""

    def __init__(self) -> None:
        self.ranging: Callable[[], bool] = lambda: False
        """Are there ranges around each backward? Who writes them calls :meth:`run` after closing one."""
        self._waiting: deque[Callable[[], None]] = deque(maxlen=MOST)
        self._patches = Patches()
        self._patched = False

    def put_off(self, action: Callable[[], None]) -> bool:
        """Keep ``action``, which must not raise, if this thread is inside a backward; False where it is not.

        The end of the first such backward is not seen; what waits for it is done when the next one begins.
        """
        import torch

        if torch._C._current_graph_task_id() == -1:
            return False
        self._waiting.append(action)
        if not self._patched:
            self._patched = True
            self._patches.set(torch.autograd, "backward", self._watched(torch.autograd.backward))
        return True

    def run(self) -> None:
        """Do what waits, unless this is inside a backward still."""
        import torch

        while self._waiting and torch._C._current_graph_task_id() == -1:
            self._waiting.popleft()()

    def remove(self) -> None:
        """Put ``torch.autograd.backward`` back; what waits is forgotten."""
        self._waiting.clear()
        self._patches.restore()

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.run()
            result = original(*args, **kwargs)
            if not self.ranging():
                self.run()
            return result

        return watched
