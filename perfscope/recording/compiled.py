"""Where compiled code comes from: what ``torch.compile`` made of which lines of the model, one file for each rank.

Compiled kernels have names of their own (``triton_poi_fused_gelu_3``), and no module is called in compiled code. The
compiler knows which operations each kernel computes, in which module and on which line they are written; that is noted
as it compiles, and written beside the rank's traces.
"""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from perfscope.frozen import dataclass
from perfscope.recording.paths import partial
from perfscope.redact import redact_texts
from perfscope.typed import WrongValue, build, read_bytes, read_json

SCHEMA: Final = "perfscope.compiled/1"

FROM_COMPILER: Final = "compiler"
"""Noted while the graph was compiled, in this process or in one that had torch cache it: complete."""
FROM_PROVENANCE: Final = "provenance"
"""From what inductor stores with a cached graph where ``INDUCTOR_PROVENANCE`` was set as it was compiled: all lines."""
FROM_CODE: Final = "code"
"""From comments in the code of a cached graph: they name operations of the forward alone."""

NO_KEY: Final = "None"
"""Key of every graph where torch's cache of graphs is off, as its range in a trace spells it."""

_FRAME: Final = re.compile(
    r'^\s*File "([^"]+)", line (\d{1,9}), in (\S+)[^\n]*(?:\n(?!\s*File ")\s*([^\n]*))?', re.MULTILINE
)
_LAUNCH: Final = re.compile(r"([^\n]+):(\d{1,9}):([^\n:]*)")
_OF_TORCH: Final = re.compile(r"[/\\](?:site|dist)-packages[/\\]torch[/\\]")
_LONGEST_CODE: Final = 200
_LARGEST_FILE: Final = 256 << 20
"""Bytes."""


@dataclass(frozen=True, kw_only=True)
class SourceLine:
    """A line of the program, in a module: what a compiled kernel computes was written there."""

    module: str = ""
    """Path below what was compiled (``layers.0.mlp``); empty: that itself, or not known."""
    kind: str = ""
    """Class of the module; empty where not known."""
    file: str = ""
    line: int = 0
    function: str = ""
    code: str = ""


@dataclass(frozen=True, kw_only=True)
class CompiledCall:
    """One call in the code of a graph: of a generated kernel or of an operator."""

    name: str
    """As the code spells it: ``triton_poi_fused_gelu_3``, ``extern_kernels.mm``, ``torch.ops.aten.bmm.default``."""
    lines: tuple[int, ...] = ()
    """Places in :attr:`CompiledCode.lines`."""
    operators: tuple[str, ...] = ()
    """The operators that it computes: ``aten.gelu``."""


@dataclass(frozen=True, kw_only=True)
class CompiledGraph:
    """A graph, and what its code calls, in this order."""

    key: str = ""
    """The one in the name of its range in a trace, ``## Call CompiledFxGraph KEY ##``; ``None`` where it has none."""
    compile_id: str = ""
    """``0/0``: which frame was compiled, for which time."""
    backward: bool = False
    known_from: str = FROM_COMPILER
    calls: tuple[CompiledCall, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AnnotatedNode:
    """A kernel of a CUDA graph that was annotated as the graph was captured (``torch.cuda.graph_annotations``)."""

    node: int
    """The graph's id in the upper 32 bits and the node's in the lower ones: kineto's ``graph node id``."""
    line: int
    """Place in :attr:`CompiledCode.lines`."""
    backward: bool | None = None
    """None where the annotation does not say."""


@dataclass(frozen=True, kw_only=True)
class CompileCost:
    """What compiling took of one process so far, by torch's own timers."""

    whole_s: float
    """From the call of a compiled function to its code, of all graphs; the part of inductor included."""
    inductor_s: float
    """In inductor: generating code and compiling it, or taking it from torch's cache."""
    graphs: int
    """That inductor was given."""


@dataclass(frozen=True, kw_only=True)
class CompiledCode:
    """All graphs that one rank compiled, or took from a cache, and the kernels of CUDA graphs that it annotated."""

    schema: str = SCHEMA
    lines: tuple[SourceLine, ...] = ()
    graphs: tuple[CompiledGraph, ...] = ()
    nodes: tuple[AnnotatedNode, ...] = ()
    cost: CompileCost | None = None
    """None where torch's timers are not there."""


def line_of_stack(stack: str) -> SourceLine | None:
    """The line that a stack as text ends on: the innermost call in the user's code or in a library of models, since
    torch's own modules are called from there. None where the text holds no call.
    """
    frames = _FRAME.findall(stack)
    outside = (frame for frame in reversed(frames) if not _OF_TORCH.search(frame[0]))
    chosen = next(outside, frames[-1] if frames else None)
    if chosen is None:
        return None
    file, number, function, code = chosen
    return SourceLine(file=file, line=int(number), function=function, code=code.strip()[:_LONGEST_CODE])


Annotation = tuple[SourceLine, bool | None]
"""Module and line of an annotated kernel, and whether it is of the backward (None: not said)."""


def of_annotation(said: Any, stack: str = "") -> Annotation | None:
    """What torch's annotation of a kernel says: a text or a dictionary, or a list of them. None where it names nothing.

    The module is its ``module_fqn``, else its name (``name``; ``str`` before torch 2.14). ``stack``: the calls that
    launched it, innermost first, each as ``file:line:function``.
    """
    merged: dict[str, Any] = {}
    for each in said if isinstance(said, list) else [said]:
        merged |= each if isinstance(each, dict) else {"name": each}
    texts = (merged.get(key) for key in ("module_fqn", "name", "said", "str", "annotation"))
    line = SourceLine(module=next((text for text in texts if isinstance(text, str)), ""))
    if frame := _LAUNCH.match(stack):
        line = replace(line, file=frame[1], line=int(frame[2]), function=frame[3])
    phase = merged.get("autograd_phase")
    return None if line == SourceLine() else (line, None if phase is None else phase == "backward")


def save(compiled: CompiledCode, path: Path) -> None:
    """Write the file, without secrets, whole or not at all. Raises OSError where that fails."""
    temporary = partial(path)
    try:
        temporary.write_text(json.dumps(redact_texts(dataclasses.asdict(compiled))) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def load(path: Path) -> CompiledCode:
    """Read one rank's file. Raises ValueError naming the file and what is wrong with it."""
    try:
        raw = read_json(read_bytes(path, _LARGEST_FILE))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise ValueError(f"{path}: expected {SCHEMA!r}; record the run again with this version")
    try:
        return build(CompiledCode, raw, [])
    except WrongValue as error:
        raise ValueError(f"{path}: is not {error}") from error
