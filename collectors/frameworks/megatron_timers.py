"""Megatron's own timers as ranges, those that ``--timing-log-level`` turns off included."""

from __future__ import annotations

import functools
from typing import Any, Final

from perfscope.collectors.annotate import Annotator
from perfscope.collectors.frameworks.hooks import Call, Hooks, owner_of
from perfscope.vocabulary import MEGATRON_TIMER_PREFIX

_MODULE: Final = "megatron.core.timers"


def range_timers(hooks: Hooks) -> None:
    """Write a range from a timer's start to its stop. Does nothing where Megatron's timers were not imported."""
    timers = owner_of(_MODULE, "Timers")
    if timers is None:
        return
    running = _Running(hooks.annotator)
    hooks.at_end.append(running.close)
    hooks.patches.set(timers, "__call__", running.remembering(vars(timers)["__call__"]))
    for kind in ("Timer", "DummyTimer"):
        owner: Any = owner_of(_MODULE, kind)
        for attribute, then in (("start", running.started), ("stop", running.stopped)):
            hooks.patches.set(owner, attribute, hooks.followed(vars(owner)[attribute], then))


class _Running:
    """The timers that run, by name.

    Timers that are turned off are one object for all: it stands for the name under which it was last asked for, which
    is how Megatron uses it, ``timers("forward-compute", log_level=2).start()``.
    """

    def __init__(self, annotator: Annotator) -> None:
        self._annotator = annotator
        self._opened: dict[str, Any] = {}
        self._asked: dict[int, str] = {}

    def remembering(self, call: Call) -> Call:
        """``Timers.__call__``, which remembers the name that it was asked for."""

        @functools.wraps(call)
        def asked(this: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            timer = call(this, name, *args, **kwargs)
            self._asked[id(timer)] = name
            return timer

        return asked

    def started(self, timer: Any) -> None:
        """A timer has started."""
        name = self._name(timer)
        if name not in self._opened:
            self._opened[name] = self._annotator.open(f"{MEGATRON_TIMER_PREFIX}{name}")

    def stopped(self, timer: Any) -> None:
        """A timer has stopped, perhaps one that had started before the capture."""
        opened = self._opened.pop(self._name(timer), None)
        if opened is not None:
            self._annotator.close(opened)

    def close(self) -> None:
        """The capture ends: close what is open, innermost first."""
        while self._opened:
            self._annotator.close(self._opened.popitem()[1])

    def _name(self, timer: Any) -> str:
        return self._asked.get(id(timer)) or str(getattr(timer, "name", ""))
