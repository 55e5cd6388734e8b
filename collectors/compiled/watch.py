"""Notes what inductor compiles: puts itself around three of its functions, and calls them through.

``compile_fx`` gets the graph of the model's operations, ``set_kernel_post_grad_provenance_tracing`` (torch 2.8) each
call of the code that is generated with the nodes that it computes, ``post_compile`` each graph that is ready, also
those that come from a cache and are not generated. Nothing of this runs in a step that compiles nothing.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from perfscope.collectors.compiled import cached, kept
from perfscope.collectors.compiled.names import NAMES
from perfscope.collectors.compiled.sources import line_of_node, operators_of, stack_of
from perfscope.collectors.launch.bootstrap import Watch
from perfscope.collectors.problems import Problems
from perfscope.recording.compiled import FROM_COMPILER, SourceLine

_COMPILER: Final = "torch._inductor.compile_fx"
_NOTES_CALLS: Final = "set_kernel_post_grad_provenance_tracing"
_GRAPHS: Final = ("torch._inductor.output_code", "torch._inductor.codecache")
"""Where ``CompiledFxGraph`` is, in newer and older versions."""
_MOST_CAPTURED: Final = 200
"""Captured graphs whose nodes are remembered: a backward may be compiled long after its forward."""
_NOTING: Final = "noting where compiled code comes from"

_watching: list[CompilerWatch] = []


def watch(problems: Callable[[], Problems]) -> None:
    """Note what this process compiles from now on, for good; a failure goes to ``problems``."""
    if _watching:
        _watching[0].problems = problems
        return
    _watching.append(CompilerWatch(problems))
    if _COMPILER in sys.modules:
        _watching[0].begin()
    else:
        sys.meta_path.insert(0, Watch({_COMPILER: _watching[0].begin}, lambda begin: begin()))


class CompilerWatch:
    """One process's compiler."""

    def __init__(self, problems: Callable[[], Problems]) -> None:
        self.problems = problems
        self._thread = threading.local()
        self._captured: OrderedDict[str, dict[str, dict[tuple[SourceLine, str], None]]] = OrderedDict()
        """Compile id -> name of nodes of the model's graph, or of its parts -> the lines and stacks that have it."""

    def begin(self) -> None:
        """The compiler has been imported."""
        self.problems().guard(_NOTING, self._begin)

    def _begin(self) -> None:
        module: Any = sys.modules[_COMPILER]
        _replace("compile_fx", module.compile_fx, self._around(module.compile_fx, before=self._note_captured))
        debug: Any = sys.modules.get("torch._inductor.debug")
        noting = getattr(debug, _NOTES_CALLS, None)
        if noting is not None:
            _replace(_NOTES_CALLS, noting, self._around(noting, before=self._note_call))
        for name in _GRAPHS:
            graph = getattr(sys.modules.get(name), "CompiledFxGraph", None)
            if graph is not None and "post_compile" in vars(graph):
                graph.post_compile = self._around(graph.post_compile, after=self._note_graph)
                break

    def _around(
        self,
        function: Callable[..., Any],
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
    ) -> Callable[..., Any]:
        """``function``, and what is called with the same arguments before or after it."""

        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                self.problems().guard(_NOTING, before, *args, **kwargs)
            result = function(*args, **kwargs)
            if after is not None:
                self.problems().guard(_NOTING, after, *args, **kwargs)
            return result

        return noted

    def _note_captured(self, model: Any, *_args: Any, **_kwargs: Any) -> None:
        """The model's operations are about to be compiled."""
        graph = getattr(model, "graph", None)
        if graph is None:
            return
        self._thread.calls = []
        lines = ((node, line_of_node(node)) for node in graph.nodes if node.op.startswith("call"))
        own = {node.name: (line, stack_of(node)) for node, line in lines if line is not None}
        self._thread.captured = own
        # DDP has a graph compiled in parts, whose nodes may have the same names.
        captured = self._captured.setdefault(_compile_id(), {})
        for name, found in own.items():
            captured.setdefault(name, {})[found] = None
        while len(self._captured) > _MOST_CAPTURED:
            self._captured.popitem(last=False)

    def _note_call(self, node_schedule: Any, kernel_name: Any, *_args: Any, **_kwargs: Any) -> None:
        """A call is being generated."""
        utils: Any = sys.modules["torch._inductor.utils"]
        nodes = [node for node in utils.aggregate_origins(node_schedule) if node.op.startswith("call")]
        lines = [line for line in map(line_of_node, nodes) if line is not None]
        self._calls().append((str(kernel_name), lines, operators_of(nodes)))

    def _note_graph(self, graph: Any, *args: Any, **kwargs: Any) -> None:
        """A graph is ready to run."""
        calls, known_from = self._calls(), FROM_COMPILER
        self._thread.calls = []
        compile_id = _compile_id()
        key = str(getattr(graph, "_fx_graph_cache_key", None))
        options = kwargs.get("graph_kwargs", args[2] if len(args) > 2 else {})
        backward = bool(options.get("is_backward")) if isinstance(options, dict) else False
        if calls:
            kept.keep(key, calls)
        else:
            captured = self._captured.get(compile_id, {})
            calls = kept.recall(key, [line for named in captured.values() for line, _ in named])
            if not calls:
                known_from, calls = cached.calls_of_cached(graph, self._nodes(captured, backward=backward))
        NAMES.add(key, compile_id, calls, backward=backward, known_from=known_from)

    def _nodes(self, captured: dict[str, dict[tuple[SourceLine, str], None]], *, backward: bool) -> cached.Captured:
        """The nodes that a graph's code may name: a forward follows its own graph, a backward may be compiled long
        after, and what several parts call by one name is no name for it.
        """
        own: dict[str, tuple[SourceLine, str]] = getattr(self._thread, "captured", {})
        if not backward and own:
            return own
        return {
            name if len(named) == 1 else f"{name} {place}": found
            for name, named in captured.items()
            for place, found in enumerate(named)
        }

    def _calls(self) -> list[cached.Found]:
        """Calls that were generated on this thread since the last graph was ready."""
        calls: list[cached.Found] | None = getattr(self._thread, "calls", None)
        if calls is None:
            calls = self._thread.calls = []
        return calls


def _replace(name: str, function: Any, replacement: Any) -> None:
    """Replace a function in every module of the compiler that has taken it."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torch._inductor") and vars(module).get(name) is function:
            setattr(module, name, replacement)


def _compile_id() -> str:
    guards: Any = sys.modules.get("torch._guards")
    context = getattr(guards, "CompileContext", None)
    return str(context.current_compile_id()) if context is not None else ""
