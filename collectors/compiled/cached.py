"""What a graph that torch took from its cache still shows of where its code comes from.

The graph itself is not in the cache. Its code is, with comments that name the operations of the model's own graph that
each call computes; those are looked up in what was captured in this process. Where ``INDUCTOR_PROVENANCE`` was set as
the graph was compiled, the cache holds each call's stacks besides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from perfscope.recording.compiled import FROM_CODE, FROM_PROVENANCE, SourceLine

Found = tuple[str, list[SourceLine], tuple[str, ...]]
"""A call's name, the lines that it computes, its operators."""
Captured = Mapping[str, tuple[SourceLine, str]]
"""Node of the model's graph -> its line, and its stack as text."""

_COMMENT: Final = re.compile(r"^\s*# (?:\w+ Sorted |Unsorted )?Source Nodes: \[(.*?)\](?:, Original ATen: \[(.*?)\])?")
_DEFINED: Final = re.compile(r"^(\w+) = async_compile\.")
_CALL: Final = re.compile(
    r"^\s+(?:[\w, ]+ = )?"
    r"((?:extern_kernels|torch\.ops|aten|inductor_ops)(?:\.\w+)+|(?:cpp|triton)_\w+|\w+(?=\.run\())(?:\.run)?\("
)
_NUMBERED: Final = re.compile(r"^\s*# \[Provenance debug handles\] (\S+:\d+)$", re.MULTILINE)
"""Stands above each call."""
_LAYER: Final = re.compile(r"(?<![^.])\d+(?![^.])")


def calls_of_cached(graph: Any, captured: Captured) -> tuple[str, list[Found]]:
    """(how they are known, the calls of a graph's code in order)."""
    code = getattr(graph, "source_code", None) or ""
    stacks = getattr(graph, "inductor_provenance_stack_traces_str", None)
    if stacks:
        found = list(_of_stacks(json.loads(stacks), code, captured))
        if found:
            return FROM_PROVENANCE, found
    return FROM_CODE, list(_of_code(code, captured))


def _of_stacks(stacks: dict[str, list[str]], code: str, captured: Captured) -> Iterator[Found]:
    """The calls that the code numbers: what is stored besides may be another graph's. A stack names no module, but is
    that of nodes of the model, whose module it has; the layers of a loop have one stack.
    """
    owners: dict[str, list[SourceLine]] = {}
    for line, stack in captured.values():
        owners.setdefault(stack, []).append(line)
    for number in _NUMBERED.finditer(code):
        found = (_common(owners.get(text, [])) for text in stacks.get(number[1], ()))
        # A stack that no node has is of the program as it was.
        yield number[1].rpartition(":")[0], [line for line in found if line is not None], ()


def _common(lines: list[SourceLine]) -> SourceLine | None:
    """The line of nodes with one stack, in their module: ``*`` for the numbers in which those differ."""
    if not lines:
        return None
    modules = {line.module for line in lines}
    folded = modules if len(modules) == 1 else {_LAYER.sub("*", module) for module in modules}
    module, kind = (folded.pop(), lines[0].kind) if len(folded) == 1 else ("", "")
    return SourceLine(**{**vars(lines[0]), "module": module, "kind": kind})


def _of_code(code: str, captured: Captured) -> Iterator[Found]:
    """A comment stands above the definition of a kernel, and above its call where that is of other operations."""
    defined: dict[str, tuple[list[SourceLine], tuple[str, ...]]] = {}
    comment: tuple[list[SourceLine], tuple[str, ...]] | None = None
    quoted = False
    for text in code.splitlines():
        if quoted or text.count("'''") == 1:
            quoted = quoted != (text.count("'''") == 1)
            if quoted and (definition := _DEFINED.match(text)):
                defined[definition[1]], comment = comment or ([], ()), None
        elif said := _COMMENT.match(text):
            lines = [captured[name][0] for name in said[1].split(", ") if name in captured]
            comment = lines, tuple(name for name in (said[2] or "").split(", ") if name)
        elif call := _CALL.match(text):
            name = call[1]
            yield (name, *(comment or defined.get(name) or ([], ())))
            comment = None
