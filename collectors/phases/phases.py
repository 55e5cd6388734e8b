"""Patches the phases of a training step, each once, and calls the sinks that listen where one begins and ends.

A phase is patched while some sink listens to it, and is the original again afterwards. The optimizer's steps are not
patched here: :mod:`perfscope.collectors.capture.attach` replaces them for the whole run and calls
:meth:`StepPhases.begin` and :meth:`StepPhases.end`.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from threading import get_ident
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Protocol

from perfscope.collectors.patches import Patches
from perfscope.collectors.phases import forward_calls
from perfscope.collectors.phases.clock import PhaseClock
from perfscope.collectors.phases.compiled import is_whole, make_gate
from perfscope.collectors.phases.forward_calls import ForwardHook, QuickHook
from perfscope.collectors.phases.loaders import UsedLoaders
from perfscope.collectors.problems import Problems
from perfscope.recording.history import STAGES

if TYPE_CHECKING:
    from perfscope.collectors.phases._clock import Gate

DATALOADER: Final = STAGES.index("dataloader")
FORWARD: Final = STAGES.index("forward")
BACKWARD: Final = STAGES.index("backward")
OPTIMIZER: Final = STAGES.index("optimizer")
ALL: Final = (DATALOADER, FORWARD, BACKWARD, OPTIMIZER)

NO_TASK: Final = -1
"""What ``torch._C._current_graph_task_id()`` is outside of every backward pass."""

BATCHES_DESCRIBED: Final = 32
"""Batches after which the loaders are described no further, once somebody has asked for their description."""

MOST_POSTPONED: Final = 1 << 14
"""Actions that may wait for a backward: several times the parameters of a model that has an optimizer for each."""

_FLAG: Final = "_is_compiling_flag"
"""Of ``torch.compiler``: is code being run to be exported?"""

Call = Callable[..., Any]


class Sink(Protocol):
    """Listens to phases. A sink that raises is switched off, and the training goes on."""

    what: str
    """What it does, for the message that it has failed."""

    def begin(self, phase: int, subject: Any) -> object:
        """``phase`` begins on the training thread; ``subject``: the module of a forward, else None."""

    def end(self, phase: int) -> None:
        """The innermost ``phase`` under way has ended, or failed."""


class StepPhases:
    """The phases of one process. Sinks hear of those on the training thread."""

    def __init__(self, problems: Problems, optimizer: Gate | None = None) -> None:
        self._problems = problems
        self._thread = get_ident()
        gates = (*map(make_gate, (DATALOADER, FORWARD, BACKWARD)), optimizer or make_gate(OPTIMIZER))
        self._gates = tuple(gate for gate in gates if gate is not None)
        """Of each phase; empty where nothing is compiled."""
        self._sinks: list[tuple[Sink, ...]] = [() for _ in ALL]
        """Sinks of each phase, outermost first."""
        self._inner_first = list(self._sinks)
        self.begins: list[Callable[..., bool]] = [self.begin for _ in ALL]
        """Of each phase what :meth:`begin` does: the clock's own where it listens alone, as outside captures. What it
        raises is for :meth:`failed`.
        """
        self.ends: list[Callable[[int], None]] = [self.end for _ in ALL]
        self._patches = {phase: Patches() for phase in (DATALOADER, FORWARD, BACKWARD)}
        self._handles: list[Any] = []
        self._settled: list[weakref.ref[Any]] = []
        """Modules whose forwards are enough to time; empty while that is not known."""
        self._postponed: deque[Callable[[], None]] = deque(maxlen=MOST_POSTPONED)
        self._postpones = False
        self._to_describe = 0
        self._forward: Any = self._gates[FORWARD] if self._gates else SimpleNamespace(inside=False)
        """``inside`` a forward that is timed by the call of its class?"""
        self.graph_task: Callable[[], int] = self._find_graph_task
        """The backward that the autograd engine runs on this thread; :data:`NO_TASK` outside of any."""
        self.loaders = UsedLoaders()
        """The data loaders that batches came from while a sink listened."""

    def _find_graph_task(self) -> int:
        import torch

        self.graph_task = torch._C._current_graph_task_id
        return self.graph_task()

    def on_this_thread(self) -> None:
        """The training thread is the one that calls."""
        self._thread = get_ident()

    def attach(self, sink: Sink, phases: Collection[int] = ALL, *, innermost: bool = False) -> None:
        """Have ``sink`` hear of these phases, around all other sinks or within them."""
        for phase in phases:
            others = tuple(each for each in self._sinks[phase] if each is not sink)
            self._set_sinks(phase, (*others, sink) if innermost else (sink, *others))

    def detach(self, sink: Sink) -> None:
        """``sink`` hears of no phase any more. A phase that nobody listens to is the original again."""
        for phase, sinks in enumerate(self._sinks):
            self._set_sinks(phase, tuple(each for each in sinks if each is not sink))
        for phase in self._patches:
            if not self._sinks[phase]:
                self._restore(phase)
        if self._settled and self._sinks[FORWARD]:
            self.settle([module for held in self._settled if (module := held()) is not None])

    def patch(self, modules: Iterable[Any]) -> None:
        """Patch data loading and backward unless they are patched, and the forwards of ``modules`` instead of those
        before.
        """
        self._problems.guard("patching data loading", self._patch_loader)
        self._problems.guard("patching the backward", self._patch_backward)
        self._restore(FORWARD)
        self._problems.guard("patching the forward", self._patch_forwards, list(modules))

    def settle(self, modules: list[Any]) -> None:
        """From now on the forwards of ``modules`` are timed alone, but for as long as another sink asks for more."""
        self._settled = [weakref.ref(module) for module in modules]
        self._restore(FORWARD)
        self._problems.guard("patching the forward", self._patch_forwards, modules)

    def describe_loaders(self) -> None:
        """Describe the loaders of the next batches also where no sink times the draw."""
        self._to_describe = BATCHES_DESCRIBED
        self._open_gate(DATALOADER)

    def begin(self, phase: int, subject: Any = None) -> bool:
        """``phase`` begins on this thread. Call :meth:`end` where this is True: it is the training thread."""
        if get_ident() != self._thread:
            return False
        for sink in self._sinks[phase]:
            try:
                sink.begin(phase, subject)
            except Exception as error:
                self._switch_off(sink, error)
        return True

    def end(self, phase: int) -> None:
        """It has ended."""
        for sink in self._inner_first[phase]:
            try:
                sink.end(phase)
            except Exception as error:
                self._switch_off(sink, error)

    def failed(self, phase: int, error: Exception) -> bool:
        """One of :attr:`begins` or :attr:`ends` of this phase has raised: the clock is switched off. False."""
        for sink in self._sinks[phase]:
            self._switch_off(sink, error)
        return False

    def postpone(self, action: Callable[[], None]) -> bool:
        """Put ``action``, which must not raise, off until the backward that this thread is inside has returned.

        False where it is inside none. Where optimizers step inside the backward, so do training steps end there: on
        autograd's own threads where there are devices, and always with the profiler's state as it was when the backward
        began. A profiler that starts or stops in there is lost, and writing its trace crashes the process.

        The end of the first such backward is not seen; what waits for it is done when the next one begins, by the
        thread that calls ``torch.autograd.backward``.
        """
        if self.graph_task() == NO_TASK:
            return False
        self._postponed.append(action)
        if not self._postpones:
            self._postpones = True
            self._patch_backward()
        return True

    def remove(self) -> None:
        """Put everything back. What was postponed is forgotten."""
        for phase in ALL:
            self._set_sinks(phase, ())
        self._postponed.clear()
        self._postpones = False
        for phase in self._patches:
            self._restore(phase)

    def _set_sinks(self, phase: int, sinks: tuple[Sink, ...]) -> None:
        self._sinks[phase], self._inner_first[phase] = sinks, sinks[::-1]
        clock = sinks[0] if len(sinks) == 1 and isinstance(sinks[0], PhaseClock) else None
        self.begins[phase] = self.begin if clock is None else clock.begin
        self.ends[phase] = self.end if clock is None else clock.end
        self._open_gate(phase)

    def _open_gate(self, phase: int) -> None:
        """Open the phase's gate, or close it, as the clock listens alone or not."""
        if not self._gates:
            return
        gate, sinks = self._gates[phase], self._sinks[phase]
        clock: Any = sinks[0] if len(sinks) == 1 else None
        described = phase == DATALOADER and self._to_describe
        if is_whole(clock) and not described:
            gate.open(clock)
        else:
            gate.close()

    def _switch_off(self, sink: Sink, error: Exception) -> None:
        self._problems.failed(sink.what, error)
        self.detach(sink)

    def _restore(self, phase: int) -> None:
        if phase == BACKWARD and self._postpones:
            return
        self._patches[phase].restore()
        while phase == FORWARD and self._handles:
            self._handles.pop().remove()

    def _patch_loader(self) -> None:
        from torch.utils.data import dataloader

        iterator: Any = dataloader._BaseDataLoaderIter
        if not self._patches[DATALOADER].any():
            self._patches[DATALOADER].set(iterator, "__next__", self._timed_draw(iterator.__next__))

    def _patch_backward(self) -> None:
        import torch.autograd

        if not self._patches[BACKWARD].any():
            patched = self.timed_backward(torch.autograd.backward)
            self._patches[BACKWARD].set(torch.autograd, "backward", patched)

    def _patch_forwards(self, modules: list[Any]) -> None:
        """The call of a class, hooks where too many modules have it, or the entry of a module that was compiled in
        place: hooks would go into the compiled code.
        """
        is_compiling = _is_compiling()
        of_class = forward_calls.classes(modules)

        def begins(module: Any, _args: Any) -> None:
            if not is_compiling():
                self.begin(FORWARD, module)

        def ended(*_: Any) -> None:
            if not is_compiling() and get_ident() == self._thread:
                self.end(FORWARD)

        before, after = ForwardHook(begins), ForwardHook(ended)
        tracing = self._tracing(FORWARD)
        if tracing is not None:
            gate = self._gates[FORWARD]
            before, after = QuickHook(begins, tracing, gate.begin_module), QuickHook(ended, tracing, gate.end_module)

        for module in modules:
            compiled = vars(module).get("_compiled_call_impl")
            if compiled is not None:
                self._patches[FORWARD].set(module, "_compiled_call_impl", self.timed(compiled, FORWARD, module))
                continue
            if type(module) in of_class:
                continue
            self._handles.append(module.register_forward_pre_hook(before, prepend=True))
            self._handles.append(module.register_forward_hook(after, always_call=True))

        for kind, these in of_class.items():
            self._patches[FORWARD].add(kind, "__call__", self._timed_call(kind, these))

    def _timed_call(self, kind: type[Any], modules: list[Any]) -> Call:
        """The call of a class that has none of its own, with the forwards of ``modules`` timed."""
        is_compiling, sinks, begins, ends, failed = _is_compiling(), self._sinks, self.begins, self.ends, self.failed
        forward = self._forward
        inherited: Any = super
        held = {id(module): weakref.ref(module) for module in modules}

        @functools.wraps(kind.__call__)
        def called(module: Any, *args: Any, **kwargs: Any) -> Any:
            # Whoever replaces the call of all modules, as tracers do, is to be heard: it is looked up each time.
            if is_compiling() or id(module) not in held or held[id(module)]() is not module:
                return inherited(kind, module).__call__(*args, **kwargs)
            # For the clock alone what a wrapper holds is a part of its forward.
            before = forward.inside
            try:
                begun = not (before and len(sinks[FORWARD]) == 1) and begins[FORWARD](FORWARD, module)
            except Exception as error:
                begun = failed(FORWARD, error)
            if not begun:
                return inherited(kind, module).__call__(*args, **kwargs)
            forward.inside = True
            try:
                return inherited(kind, module).__call__(*args, **kwargs)
            finally:
                forward.inside = before
                try:
                    ends[FORWARD](FORWARD)
                except Exception as error:
                    failed(FORWARD, error)

        tracing = self._tracing(FORWARD)
        return called if tracing is None else self._quick_call(kind, held, called, tracing)

    def _quick_call(
        self, kind: type[Any], held: dict[int, weakref.ref[Any]], called: Call, tracing: Callable[[], bool]
    ) -> Call:
        """``called``, with a shorter way for plain calls of the modules ``held``."""
        gate, end_after_all = self._gates[FORWARD], self._end_after_all
        begin, end = gate.begin_outermost, gate.end_outermost
        inherited: Any = super

        @functools.wraps(kind.__call__)
        def quick(module: Any, *args: Any, **kwargs: Any) -> Any:
            if tracing():
                return inherited(kind, module).__call__(*args, **kwargs)
            if not begin(module, held):
                return called(module, *args, **kwargs)
            try:
                return inherited(kind, module).__call__(*args, **kwargs)
            finally:
                if not end():
                    end_after_all(FORWARD)

        return quick

    def _tracing(self, phase: int) -> Callable[[], bool] | None:
        """What answers whether the compiler is tracing the code that asks; :func:`_is_compiling` does that and tells
        whether code is run to be exported, for which the phase's gate looks itself. None without gates, and with a
        torch that has neither.
        """
        import torch.compiler

        tracing: Callable[[], bool] | None = getattr(torch.compiler, "is_dynamo_compiling", None)
        if not self._gates or tracing is None or _FLAG not in vars(torch.compiler):
            return None
        self._gates[phase].ask(torch.is_grad_enabled, vars(torch.compiler), _FLAG)
        return tracing

    def _end_after_all(self, phase: int) -> None:
        """A phase has ended, and since it began somebody else has begun to listen, or the clock has ceased to."""
        try:
            self.ends[phase](phase)
        except Exception as error:
            self.failed(phase, error)

    def timed_backward(self, original: Call) -> Call:
        """The same as :meth:`timed`, for the backward."""
        patched, tracing = self.timed(original, BACKWARD), self._tracing(BACKWARD)
        if tracing is None:
            return patched
        gate, postponed, end_after_all = self._gates[BACKWARD], self._postponed, self._end_after_all
        begin, end = gate.begin, gate.end

        @functools.wraps(original)
        def quick(*args: Any, **kwargs: Any) -> Any:
            if tracing():
                return original(*args, **kwargs)
            if postponed or not begin():
                return patched(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            finally:
                if not end():
                    end_after_all(BACKWARD)
            if postponed:
                self._act()
            return result

        return quick

    def timed(self, original: Call, phase: int, subject: Any = None) -> Call:
        """``original``, and the sinks of ``phase`` told of each of its calls on the training thread."""
        is_compiling, begins, ends, failed = _is_compiling(), self.begins, self.ends, self.failed
        postponed = self._postponed if phase == BACKWARD else ()

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            if postponed:
                self._act()
            try:
                begun = begins[phase](phase, subject)
            except Exception as error:
                begun = failed(phase, error)
            try:
                result = original(*args, **kwargs)
            finally:
                if begun:
                    try:
                        ends[phase](phase)
                    except Exception as error:
                        failed(phase, error)
            if postponed:
                self._act()
            return result

        return patched

    def _act(self) -> None:
        """Do what was postponed, unless this is inside a backward still."""
        while self._postponed and self.graph_task() == NO_TASK:
            self._postponed.popleft()()

    def _timed_draw(self, draw: Call) -> Call:
        """``draw``, which takes a batch from an iterator: timed, and the loader that it came from described."""
        loaders, begins, ends, failed = self.loaders, self.begins, self.ends, self.failed

        @functools.wraps(draw)
        def drawn(iterator: Any) -> Any:
            try:
                training = begins[DATALOADER](DATALOADER)
            except Exception as error:
                training = failed(DATALOADER, error)
            try:
                batch = draw(iterator)
            finally:
                if training:
                    try:
                        ends[DATALOADER](DATALOADER)
                    except Exception as error:
                        failed(DATALOADER, error)
            if self._to_describe or (loaders.took is not None and training):
                self._to_describe = max(self._to_describe - 1, 0)
                if not self._to_describe:
                    self._open_gate(DATALOADER)
                self._problems.guard("describing the data loader", loaders.drew, iterator, batch)
            return batch

        return self._quick_draw(draw, drawn) if self._gates else drawn

    def _quick_draw(self, draw: Call, drawn: Call) -> Call:
        """``drawn``, which does the same as ``draw``, with a shorter way for plain calls."""
        begin, end, end_after_all = self._gates[DATALOADER].begin, self._gates[DATALOADER].end, self._end_after_all

        @functools.wraps(draw)
        def quick(iterator: Any) -> Any:
            if not begin():
                return drawn(iterator)
            try:
                return draw(iterator)
            finally:
                if not end():
                    end_after_all(DATALOADER)

        return quick


def _is_compiling() -> Callable[[], bool]:
    """What answers whether the compiler is tracing the code that asks."""
    import torch.compiler

    return getattr(torch.compiler, "is_compiling", lambda: False)
