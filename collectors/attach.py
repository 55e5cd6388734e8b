"""Hooks the end of optimizer steps, once torch (or DeepSpeed's engine) has been imported. Called by the bootstrap."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perfscope.collectors import session
from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.session import Collector, Session

Stepped = Callable[[Session], None]
"""Tells the session what has stepped."""


def attach_torch(folder: str) -> None:
    """Torch has been imported: every optimizer made from now on tells of its steps. ``folder`` is the bootstrap's.

    Not a global post-step hook: that one runs inside the step's own range, and twice for optimizers that derive from
    another. Nor the optimizers' classes: each wraps its own ``step`` when it is first made, with what is replaced here.
    """
    collector = session.attach(CollectorConfig.load(Path(folder)))
    torch: Any = sys.modules["torch"]
    edges = _Edges(collector, torch)
    optimizer = torch.optim.Optimizer
    hook_step = optimizer.profile_hook_step

    @functools.wraps(hook_step)
    def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
        # Skipped by the compiler, which would swallow the counting; the step below is compiled as before.
        counted: Callable[..., Any] = torch._disable_dynamo(_counted(edges, hook_step(step)), recursive=False)
        return counted

    optimizer.profile_hook_step = staticmethod(profile_hook_step)
    scaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
    scaler._maybe_opt_step = _counted_scaler_step(edges, scaler._maybe_opt_step)


def attach_deepspeed(_folder: str) -> None:
    """DeepSpeed's engine has been imported: its own steps count, instead of its optimizers'."""
    collector = session.attached()
    if collector is None:
        return
    edges = _Edges(collector, sys.modules["torch"])
    engine: Any = sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine
    for name in ("step", "_take_model_step"):  # pipeline engines call the latter without the former
        setattr(engine, name, _counted_engine_step(edges, getattr(engine, name)))


class _Edges:
    """The beginning and the end of a step, as functions that the compiler leaves alone with all that they call."""

    def __init__(self, collector: Collector, torch: Any) -> None:
        def enter() -> Any:
            return collector.enter()

        def leave(record: Any, stepped: Stepped | None) -> None:
            collector.leave(record, stepped)

        self.enter: Callable[[], Any] = torch._disable_dynamo(enter)
        self.leave: Callable[[Any, Stepped | None], None] = torch._disable_dynamo(leave)


def _counted(edges: _Edges, step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's ``step`` that tells the collector when it has ended."""

    @functools.wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        stepped = None
        record = edges.enter()
        try:
            result = step(*args, **kwargs)
            stepped = functools.partial(Session.optimizer_stepped, optimizer=args[0])
            return result
        finally:
            edges.leave(record, stepped)

    return counted


def _counted_scaler_step(edges: _Edges, maybe_step: Callable[..., Any]) -> Callable[..., Any]:
    """``GradScaler._maybe_opt_step``: the step that it skips, having met an overflow, ends a training step too."""

    @functools.wraps(maybe_step)
    def counted(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        stepped = None
        record = edges.enter()
        try:
            result = maybe_step(self, optimizer, *args, **kwargs)
            stepped = functools.partial(Session.optimizer_stepped, optimizer=optimizer)
            return result
        finally:
            edges.leave(record, stepped)

    return counted


def _counted_engine_step(edges: _Edges, step: Callable[..., Any]) -> Callable[..., Any]:
    """An engine's step, which ends a training step when it has changed ``global_steps``."""

    @functools.wraps(step)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        stepped = None
        record = edges.enter()
        before = self.global_steps
        try:
            result = step(self, *args, **kwargs)
            if self.global_steps != before:
                stepped = Session.engine_stepped
            return result
        finally:
            edges.leave(record, stepped)

    return counted
