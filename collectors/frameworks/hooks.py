"""Ranges for what frameworks do and torch leaves without a name, while a capture runs and no longer.

A framework that the script has not imported is left alone, and so is an attribute that its version does not have. A
part that fails is one problem and is switched off by itself; whoever owns the patches puts the originals back.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from perfscope.collectors.annotate import Annotator
from perfscope.collectors.discovery import has_compiled, loaded
from perfscope.collectors.patches import Patches
from perfscope.collectors.problems import Problems

Call = Callable[..., Any]


@dataclass(frozen=True)
class Hooks:
    """What a framework's ranges are made with."""

    patches: Patches
    annotator: Annotator
    problems: Problems
    wanted: Callable[[], bool]
    """Is this the training thread, and does the capture run?"""
    around: Callable[[Call, str, bool], Call]
    """(original, name of the range, on any thread?) -> ``original`` within the range, where not already inside it."""
    observed: dict[str, Any] = field(default_factory=dict)
    """What the hooks saw of settings that no object holds; kept by whoever installs the hooks."""
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Called when the capture ends, to close what is open."""

    def ranged(self, original: Call, begin: Callable[..., Any], end: Callable[[Any, Any], None] | None = None) -> Call:
        """``original`` within the range that ``begin(*its arguments)`` opens and returns (None: none).

        ``end(record, result)`` closes it; without, the annotator does.
        """
        what = f"the range around {getattr(original, '__qualname__', original)}"

        @functools.wraps(original)
        def within(*args: Any, **kwargs: Any) -> Any:
            record = self.problems.guard(what, begin, *args, **kwargs) if self.wanted() else None
            result = None
            try:
                result = original(*args, **kwargs)
                return result
            finally:
                if record is not None and end is not None:
                    self.problems.guard(what, end, record, result)
                elif record is not None:
                    self.problems.guard("closing a range", self.annotator.end, record)

        return within

    def followed(self, original: Call, then: Callable[[Any], None]) -> Call:
        """``original``, a method, and ``then(self)`` after it."""
        what = f"the range around {getattr(original, '__qualname__', original)}"

        @functools.wraps(original)
        def following(this: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(this, *args, **kwargs)
            if self.wanted():
                self.problems.guard(what, then, this)
            return result

        return following


@dataclass(frozen=True)
class RangedFunction:
    """A function or method that gets a range of its own."""

    module: str
    owner: str
    """Class that the method belongs to; empty for a function of the module."""
    attribute: str
    range: str
    anywhere: bool = False
    """On any thread: autograd's threads reduce gradients and gather parameters, too."""


def owner_of(module: str, owner: str) -> Any:
    """The module, or the class in it, where somebody has imported it; None else."""
    if not owner:
        return sys.modules.get(module)
    return next(iter(loaded([(module, owner)])), None)


def range_functions(hooks: Hooks, phases: Iterable[RangedFunction]) -> None:
    """Give each phase that is there its range."""
    for phase in phases:
        owner = owner_of(phase.module, phase.owner)
        original = vars(owner).get(phase.attribute) if owner is not None else None
        if callable(original):
            hooks.patches.set(owner, phase.attribute, hooks.around(original, phase.range, phase.anywhere))


def range_collectives(hooks: Hooks, owner: Any, names: Iterable[str], name: str) -> None:
    """Give those of an owner's functions that carry out collectives the range ``name``, on any thread.

    Not where anything is compiled: code that calls them would be compiled anew for what replaces them.
    """
    if has_compiled():
        return
    for attribute in names:
        original = vars(owner).get(attribute)
        if callable(original):
            hooks.patches.set(owner, attribute, hooks.around(original, name, True))
