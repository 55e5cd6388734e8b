"""What inductor itself writes of where its kernels come from, among a folder's files.

``kernel_information.json`` (AOTInductor's packages): ``{"triton_poi_fused_gelu_0:3": {"stack_traces": […],
"post_grad_nodes": […], "pre_grad_nodes": […]}}``, the number being that of the call.
``inductor_provenance_tracking_kernel_stack_traces.json`` (structured logs, with ``INDUCTOR_PROVENANCE=1``) has the
stacks alone. Neither says which graph calls a kernel, or in which module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from perfscope.recording.compiled import NO_KEY, CompiledCall, CompiledCode, CompiledGraph, SourceLine, line_of_stack
from perfscope.typed import read_bytes, read_json

_NAME: Final = re.compile(r"(?:^|[_-])kernel_information[\w.-]*\.json$|inductor_provenance_tracking_[\w.-]+\.json$")
_LARGEST_FILE: Final = 256 << 20
"""Bytes."""
_MOST_STACKS: Final = 10_000
"""Of one kernel."""


def find(files: Iterable[Path]) -> tuple[Path, ...]:
    """Those of ``files`` that inductor wrote about its kernels, by name."""
    return tuple(path for path in files if _NAME.search(path.name))


def read(path: Path) -> CompiledCode:
    """The kernels of a file with the lines that they compute, as one graph without a key; nothing where the file holds
    only nodes' names. Raises ValueError naming the file and what is wrong with it.
    """
    try:
        raw = read_json(read_bytes(path, _LARGEST_FILE))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    lines: dict[SourceLine, int] = {}
    calls = []
    for name, described in raw.items() if isinstance(raw, Mapping) else ():
        stacks = described.get("stack_traces") if isinstance(described, Mapping) else described
        found = (line_of_stack(text) for text in _texts(stacks))
        places = dict.fromkeys(lines.setdefault(line, len(lines)) for line in found if line is not None)
        if places:
            calls.append(CompiledCall(name=str(name).rpartition(":")[0] or str(name), lines=tuple(places)))
    graphs = (CompiledGraph(key=NO_KEY, calls=tuple(calls)),) if calls else ()
    return CompiledCode(lines=tuple(lines), graphs=graphs)


def _texts(value: Any) -> Iterable[str]:
    return (each for each in value[:_MOST_STACKS] if isinstance(each, str)) if isinstance(value, list) else ()
