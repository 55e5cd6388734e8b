"""All frameworks' ranges together: installed for each capture, gone after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from perfscope.collectors.annotate import Annotator
from perfscope.collectors.frameworks import accelerate, deepspeed, horovod, lightning, megatron, nvtx, transformers
from perfscope.collectors.frameworks.hooks import Call, Hooks
from perfscope.collectors.patches import Patches
from perfscope.collectors.problems import Problems

_FRAMEWORKS: Final = (accelerate, deepspeed, horovod, lightning, megatron, nvtx, transformers)


class FrameworkRanges:
    """The ranges of the frameworks that the script uses."""

    def __init__(self, annotator: Annotator, problems: Problems) -> None:
        self._annotator = annotator
        self._problems = problems
        self._patches = Patches()
        self._hooks: Hooks | None = None
        self.observed: dict[str, Any] = {}
        """What was seen of settings that no object holds, by the framework's own name of the setting."""

    def install(self, wanted: Callable[[], bool], around: Callable[[Call, str, bool], Call]) -> None:
        """Begin to write ranges: those of a framework that fails are left out, and said."""
        self._hooks = Hooks(self._patches, self._annotator, self._problems, wanted, around, self.observed)
        for framework in _FRAMEWORKS:
            name = framework.__name__.rpartition(".")[2]
            self._problems.guard(f"the ranges of {name}", framework.install, self._hooks)

    def remove(self) -> None:
        """Put everything back and close what is open."""
        self._patches.restore()
        hooks, self._hooks = self._hooks, None
        for close in hooks.at_end if hooks is not None else ():
            self._problems.guard("closing a framework's ranges", close)

    def forget(self) -> None:
        """In a forked child: put everything back, but close nothing, for what is open is its parent's."""
        self._patches.restore()
        self._hooks = None
