"""All frameworks together: their ranges, installed for each capture and gone after it, and their settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Final

from perfscope.collectors.annotate import Annotator
from perfscope.collectors.discovery import JobObjects
from perfscope.collectors.frameworks import accelerate, deepspeed, horovod, lightning, megatron, nvtx, transformers
from perfscope.collectors.frameworks import torch as torch_itself
from perfscope.collectors.frameworks.hooks import Call, Hooks, RangedFunction, range_functions
from perfscope.collectors.patches import Patches
from perfscope.collectors.problems import Problems

Settings = dict[str, dict[str, Any]]

_FRAMEWORKS: Final = (torch_itself, accelerate, deepspeed, horovod, lightning, megatron, nvtx, transformers)


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
        """Begin to write ranges: those of a framework that fails are left out, with a problem."""
        self._hooks = Hooks(self._patches, self._annotator, self._problems, wanted, around, self.observed)
        for framework in _FRAMEWORKS:
            name = framework.__name__.rpartition(".")[2]
            self._problems.guard(f"the ranges of {name}", install_ranges, framework, self._hooks)

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


def ranged_functions() -> list[RangedFunction]:
    """Every function of a framework that gets a range of its own."""
    return [function for framework in _FRAMEWORKS for function in getattr(framework, "PHASES", ())]


def install_ranges(framework: ModuleType, hooks: Hooks) -> None:
    """Give the functions of one framework their ranges: what its ``install`` does, then those of its ``PHASES``."""
    if hasattr(framework, "install"):
        framework.install(hooks)
    range_functions(hooks, getattr(framework, "PHASES", ()))


def describe_frameworks(
    objects: JobObjects, optimizers: Iterable[Any], observed: dict[str, Any], problems: Problems
) -> tuple[list[str], Settings]:
    """Strategies that frameworks carry out themselves, and the settings of each framework and strategy.

    A framework that cannot be described is left out, and said.
    """
    optimizers = list(optimizers)
    names: list[str] = []
    settings: Settings = {}
    for framework, call in (
        ("deepspeed", lambda: deepspeed.describe(objects)),
        ("megatron", lambda: megatron.describe(objects, optimizers, observed)),
        ("horovod", lambda: horovod.describe(optimizers)),
    ):
        described = problems.guard(f"describing {framework}", call)
        if described is not None:
            names.extend(described[0])
            settings.update(described[1])
    for trainer in (accelerate, transformers, lightning):
        framework = trainer.__name__.rpartition(".")[2]
        held = problems.guard(f"describing {framework}", trainer.describe, objects)
        if held is not None:
            settings[framework] = held
    autocast = problems.guard("describing accelerate's autocast", accelerate.autocast_dtype, objects)
    if autocast:
        settings["amp"] = {"dtype": autocast}
    return names, settings
