"""The script's own NVTX ranges (its frameworks' too: DeepSpeed, Megatron) as ranges of the profiler's trace.

``torch.profiler`` does not see them. Nothing is written to NVTX here: the originals do that.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Final

from perfscope.collectors.discovery import has_compiled
from perfscope.collectors.frameworks.hooks import Hooks, owner_of

_MODULE: Final = "torch.cuda.nvtx"


def install(hooks: Hooks) -> None:
    """Mirror ``torch.cuda.nvtx.range_push`` and ``range_pop``, which frameworks look up at each call."""
    from torch.autograd.profiler import record_function

    module = owner_of(_MODULE, "")
    if module is None or has_compiled():  # compiled code that calls them would be compiled anew
        return
    stacks = _Stacks()

    def push(name: Any) -> None:
        record: Any = record_function(str(name))
        record.__enter__()
        stacks.mine.append(record)

    def pop() -> None:
        if stacks.mine:
            stacks.mine.pop().__exit__(None, None, None)

    original_push, original_pop = vars(module)["range_push"], vars(module)["range_pop"]

    @functools.wraps(original_push)
    def pushed(msg: Any, *args: Any, **kwargs: Any) -> Any:
        result = original_push(msg, *args, **kwargs)
        hooks.problems.guard("the script's NVTX ranges", push, msg)
        return result

    @functools.wraps(original_pop)
    def popped(*args: Any, **kwargs: Any) -> Any:
        hooks.problems.guard("the script's NVTX ranges", pop)
        return original_pop(*args, **kwargs)

    hooks.at_end.append(stacks.close_mine)
    hooks.patches.set(module, "range_push", pushed)
    hooks.patches.set(module, "range_pop", popped)


class _Stacks(threading.local):
    """The open ranges of each thread, innermost last."""

    def __init__(self) -> None:
        self.mine: list[Any] = []

    def close_mine(self) -> None:
        """Close this thread's, innermost first."""
        while self.mine:
            self.mine.pop().__exit__(None, None, None)
