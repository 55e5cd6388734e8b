"""From a node of a compiler's graph to the line of the program that it stands for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from perfscope.recording.compiled import SourceLine, line_of_stack

_ROOT: Final = re.compile(r"^(?:[GL]\['?\w+'?\]|\w+(?=[.\[]|$))")
_STEP: Final = re.compile(r"\[['\"]?([^'\"\]]+)['\"]?\]")
_WRAPPERS: Final = re.compile(r"^(?:(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?:\.|$))+")


def line_of_node(node: Any) -> SourceLine | None:
    """Module and line of a node, forward or backward; None where the graph has neither."""
    return line_of(stack_of(node), node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack"))


def stack_of(node: Any) -> str:
    """The calls in which a node was captured, as text; empty where they were not recorded."""
    return str(getattr(node, "stack_trace", None) or node.meta.get("stack_trace") or "")


def line_of(stack: str, modules: Any) -> SourceLine | None:
    """The line that a stack as text ends on, in the innermost of ``modules`` (key -> (path, class))."""
    line = line_of_stack(stack)
    innermost = list(modules.values())[-1] if isinstance(modules, dict) and modules else None
    if not (isinstance(innermost, tuple) and len(innermost) == 2):
        return line
    path, kind = innermost
    return replace(
        line or SourceLine(),
        module=module_path(str(path)),
        kind=kind.rpartition(".")[2] if isinstance(kind, str) else getattr(kind, "__name__", ""),
    )


def module_path(spelled: str) -> str:
    """A module's path as ``named_modules`` has it: ``L['self']._modules['layers'][0].fc`` is ``layers.0.fc``."""
    inner = _ROOT.sub("", spelled.replace("._modules", "").replace("_modules", ""), count=1)
    return _WRAPPERS.sub("", _STEP.sub(r".\1", inner).strip("."))


def operators_of(nodes: Iterable[Any]) -> tuple[str, ...]:
    """The operators that nodes computed before they were decomposed, each once: ``aten.gelu``."""
    named: dict[str, None] = {}
    for node in nodes:
        operator = node.meta.get("original_aten")
        name = getattr(operator, "_overloadpacket", None) or getattr(operator, "_name", None)
        if name is not None:
            named[str(name)] = None
    return tuple(named)
