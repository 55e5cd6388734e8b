"""Hooks the end of training steps, once torch (or an engine that steps by itself) has been imported.

Called by the bootstrap. What is replaced here stays so for the whole run: steps are found this way.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from perfscope.collectors.capture import session
from perfscope.collectors.capture.session import Collector, Session
from perfscope.collectors.compiled.watch import watch as watch_compiler
from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.launch.bootstrap import RUN_BACKWARD
from perfscope.collectors.phases.phases import NO_TASK


def attach_torch(folder: str) -> None:
    """Torch has been imported: count the steps of every optimizer made from now on. ``folder`` is the bootstrap's.

    Not a global post-step hook: that one runs inside the step's own range, and twice for optimizers that derive from
    another. Nor the optimizers' classes: each wraps its own ``step`` when it is first made, with what is replaced here.
    """
    hook_torch(session.attach(CollectorConfig.load(Path(folder))))


def hook_torch(collector: Collector) -> Edges:
    """Have the collector count the steps of every optimizer whose class makes its first object from now on."""
    torch: Any = sys.modules["torch"]
    watch_compiler(lambda: collector.problems)
    edges = Edges(collector, torch)
    optimizer = torch.optim.Optimizer
    hook_step = optimizer.profile_hook_step

    @functools.wraps(hook_step)
    def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
        # Skipped by the compiler, which would swallow the counting; the step below is compiled as before.
        counted: Callable[..., Any] = torch._disable_dynamo(counted_step(edges, hook_step(step)), recursive=False)
        return counted

    optimizer.profile_hook_step = staticmethod(profile_hook_step)
    scaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
    scaler._maybe_opt_step = _counted_scaler_step(edges, scaler._maybe_opt_step)
    return edges


def attach_backwards(_folder: str, passes: Sequence[bool]) -> None:
    """This process has run backward passes and made no optimizer: they were steps, and each further one ends a step."""
    collector = session.attached()
    if collector is not None:
        count_backwards(collector, passes)


def count_backwards(collector: Collector, passes: Sequence[bool]) -> None:
    """Have the end of every outermost backward pass end a step, as long as nothing tells steps better. ``passes`` have
    ended before: whether each has written ``.grad``.
    """
    torch: Any = sys.modules["torch"]
    collector.report(Session.backwards_ended_before, passes)
    run = getattr(torch.autograd, RUN_BACKWARD)

    @functools.wraps(run)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        outermost = torch._C._current_graph_task_id() == NO_TASK
        result = run(*args, **kwargs)
        if outermost:
            accumulates = bool(kwargs.get("accumulate_grad"))
            collector.report(functools.partial(Session.backward_ended, accumulates=accumulates))
        return result

    setattr(torch.autograd, RUN_BACKWARD, torch._disable_dynamo(run_backward, recursive=False))


def attach_deepspeed(_folder: str) -> None:
    """DeepSpeed's engine has been imported: its own steps count, instead of its optimizers'."""
    collector = session.attached()
    if collector is None:
        return
    edges = Edges(collector, sys.modules["torch"])
    engine: Any = sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine
    engine.step = _counted_engine_step(edges, engine.step, _ends_accumulation)
    # Pipeline engines call this one without the other.
    engine._take_model_step = _counted_engine_step(edges, engine._take_model_step)


def attach_megatron(_folder: str) -> None:
    """Megatron's optimizers have been imported: each holds others, whose steps are parts of its own.

    One that met an overflow steps none of them, and the training step is over all the same.
    """
    collector = session.attached()
    if collector is None:
        return
    edges = Edges(collector, sys.modules["torch"])
    for kind in list(vars(sys.modules["megatron.core.optimizer.optimizer"]).values()):
        step = vars(kind).get("step") if isinstance(kind, type) else None
        if callable(step) and not getattr(step, "__isabstractmethod__", False):
            setattr(kind, "step", counted_step(edges, step))  # noqa: B010 - mypy: a method is not to be assigned to


def attach_horovod(_folder: str) -> None:
    """Horovod's functions have been imported: sending the optimizer's state out takes a step to have any, and none."""
    collector = session.attached()
    if collector is None:
        return
    edges = Edges(collector, sys.modules["torch"])
    uncounted = _uncounted(edges, sys.modules["horovod.torch.functions"].broadcast_optimizer_state)
    for name in ("horovod.torch.functions", "horovod.torch"):  # the latter may have taken it already
        module: Any = sys.modules.get(name)
        if hasattr(module, "broadcast_optimizer_state"):
            module.broadcast_optimizer_state = uncounted


def _uncounted(edges: Edges, call: Callable[..., Any]) -> Callable[..., Any]:
    """A function within which optimizer steps are none of the training's."""

    @functools.wraps(call)
    def uncounted(*args: Any, **kwargs: Any) -> Any:
        edges.enter_without_phase()
        try:
            return call(*args, **kwargs)
        finally:
            edges.leave(False, None)

    return uncounted


class Edges:
    """The beginning and the end of a step, as functions that the compiler leaves alone with all that they call."""

    def __init__(self, collector: Collector, torch: Any) -> None:
        # Functions, not the collector's methods: the compiler marks what it is to leave alone with an attribute.
        # With arguments of their own: every step calls them, and passing on any arguments would take longer.
        alone = torch._disable_dynamo
        self.collector = collector
        self.compiling = _compiling(torch)
        """Would the compiler take what is called now?"""
        self.optimizer_steps = 0
        """Optimizer steps begun, nested ones included, but for those that the collector handles as passing."""
        self.enter: Callable[[], bool] = alone(lambda: collector.enter())  # noqa: PLW0108
        self.enter_without_phase: Callable[[], bool] = alone(lambda: collector.enter_without_phase())  # noqa: PLW0108
        self.begin: Callable[[], bool] = alone(lambda: collector.begin())  # noqa: PLW0108
        self.end: Callable[[bool], None] = alone(lambda begun: collector.end(begun))  # noqa: PLW0108
        self.leave: Callable[..., None] = alone(
            lambda begun, stepped, *subject: collector.leave(begun, stepped, *subject)  # noqa: PLW0108
        )

    def steps_begun(self) -> int:
        """Optimizer steps begun, nested ones included."""
        passing = self.collector.passing
        return self.optimizer_steps + (0 if passing is None else passing.begun)


def _compiling(torch: Any) -> Callable[[], object]:
    """What answers None where the compiler is not at work on what is being called."""
    evaluation = getattr(getattr(torch, "_C", None), "_dynamo", None)
    callback: Callable[[], object] = getattr(
        getattr(evaluation, "eval_frame", None), "get_eval_frame_callback", lambda: False
    )
    return callback


def counted_step(edges: Edges, step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's ``step`` that reports its end to the collector."""
    collector, compiling, stepped = edges.collector, edges.compiling, Session.optimizer_stepped
    passing = collector.passing

    # One function: the compiler is to leave it alone, and takes each that it calls.
    @functools.wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) > 1:
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if callable(closure):
                edges.optimizer_steps += 1
                return _step_with_closure(edges, step, closure, args, kwargs)
        ended = None
        # At every step of the run: what keeps the compiler away takes longer than what it is kept away from.
        if compiling() is None:
            if passing is not None and passing.begin():
                try:
                    result = step(*args, **kwargs)
                    ended = args[0]
                    return result
                finally:
                    if not passing.leave(ended):
                        collector.report(stepped, ended)
            edge: Any = collector
        else:
            edge = edges
        edges.optimizer_steps += 1
        begun = edge.enter()
        try:
            result = step(*args, **kwargs)
            ended = stepped
            return result
        finally:
            edge.leave(begun, ended, args[0])

    return counted


def _step_with_closure(
    edges: Edges, step: Callable[..., Any], closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A step that calls a closure: the forward and backward in there are none of the optimizer's time.

    Its range begins after the first call and is interrupted by each further one. Lightning steps in this way always,
    and many an optimizer, such as LBFGS, does so several times.
    """
    stepped = None
    begun = False
    outermost = edges.enter_without_phase()

    @functools.wraps(closure)
    def interrupting() -> Any:
        nonlocal begun
        edges.end(begun)
        begun = False
        try:
            return closure()
        finally:
            begun = outermost and edges.begin()

    if "closure" in kwargs:
        kwargs = {**kwargs, "closure": interrupting}
    else:
        args = (args[0], interrupting, *args[2:])
    try:
        result = step(*args, **kwargs)
        stepped = Session.optimizer_stepped
        return result
    finally:
        edges.leave(begun, stepped, args[0])


def _counted_scaler_step(edges: Edges, maybe_step: Callable[..., Any]) -> Callable[..., Any]:
    """``GradScaler._maybe_opt_step``: the step that it skips, having met an overflow, ends a training step too."""

    @functools.wraps(maybe_step)
    def counted(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        stepped = None
        steps_before = edges.steps_begun()
        begun = edges.enter()
        try:
            result = maybe_step(self, optimizer, *args, **kwargs)
            skipped = edges.steps_begun() == steps_before
            stepped = functools.partial(Session.optimizer_stepped, optimizer=optimizer, skipped=skipped)
            return result
        finally:
            edges.leave(begun, stepped)

    return counted


def _counted_engine_step(
    edges: Edges, step: Callable[..., Any], updates: Callable[[Any], bool] = lambda _: True
) -> Callable[..., Any]:
    """An engine's step, which ends a training step when it has changed ``global_steps``.

    Unless ``updates(engine)`` it will do next to nothing, being between the micro-batches of a training step, and is
    left alone.
    """

    @functools.wraps(step)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = getattr(self, "global_steps", None)
        if before is None or not updates(self):
            return step(self, *args, **kwargs)
        stepped = None
        begun = edges.enter()
        try:
            result = step(self, *args, **kwargs)
            if self.global_steps != before:
                stepped = Session.engine_stepped
            return result
        finally:
            edges.leave(begun, stepped)

    return counted


def _ends_accumulation(engine: Any) -> bool:
    """Will the engine's step update the model? Yes, where it cannot be asked."""
    try:
        return bool(engine.is_gradient_accumulation_boundary())
    except Exception:
        return True
