"""From a node of a compiler's graph to the line of the program that it stands for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from perfscope.recording.compiled import SourceLine

_FRAME: Final = re.compile(
    r'^\s*File "([^"]+)", line (\d{1,9}), in (\S+)[^\n]*(?:\n(?!\s*File ")\s*([^\n]*))?', re.MULTILINE
)
_OF_TORCH: Final = re.compile(r"[/\\](?:site|dist)-packages[/\\]torch[/\\]")
_LONGEST_CODE: Final = 200
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
    """The line that a stack as text ends on, in the innermost of ``modules`` (key -> (path, class)).

    The innermost call in the user's code or a library of models: torch's own modules are called from there.
    """
    frames = _FRAME.findall(stack)
    chosen = next(
        (frame for frame in reversed(frames) if not _OF_TORCH.search(frame[0])), frames[-1] if frames else None
    )
    innermost = list(modules.values())[-1] if isinstance(modules, dict) and modules else None
    if chosen is None and innermost is None:
        return None
    path, kind = innermost if isinstance(innermost, tuple) and len(innermost) == 2 else ("", "")
    file, number, function, code = chosen or ("", "0", "", "")
    return SourceLine(
        module=module_path(str(path)),
        kind=kind.rpartition(".")[2] if isinstance(kind, str) else getattr(kind, "__name__", ""),
        file=file,
        line=int(number),
        function=function,
        code=code.strip()[:_LONGEST_CODE],
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
