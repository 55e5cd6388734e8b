"""Keeps what was noted of a graph beside torch's cached graphs, for the next process that takes the graph from there.

A cached graph is found by what it computes, and the program may have changed around it: what was kept is used only
where every line of it is still one of the model that was captured now. It goes when torch's cache is removed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from perfscope.collectors.compiled.cached import Found
from perfscope.recording.compiled import CompiledCall, CompiledCode, CompiledGraph, SourceLine, load, save

_FOLDER: Final = "perfscope"
"""In torch's cache."""
_KEY: Final = re.compile(r"\w{16,}")
_PLACES: Final = ("torch._inductor.runtime.cache_dir_utils", "torch._inductor.runtime.runtime_utils")
"""Where ``cache_dir`` is, in newer and older versions."""


def keep(key: str, calls: Sequence[Found]) -> None:
    """Keep the calls of the graph that torch has cached under ``key``. What cannot be written is not kept."""
    path = _path(key)
    if path is None:
        return
    places: dict[SourceLine, int] = {}
    made = tuple(
        CompiledCall(
            name=name, lines=tuple(places.setdefault(line, len(places)) for line in lines), operators=operators
        )
        for name, lines, operators in calls
    )
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        save(CompiledCode(lines=tuple(places), graphs=(CompiledGraph(key=key, calls=made),)), path)


def recall(key: str, lines: Sequence[SourceLine]) -> list[Found]:
    """The calls that were kept for a graph; none where nothing was, or a line is not in ``lines`` any more."""
    path = _path(key)
    try:
        kept = load(path) if path is not None and path.exists() else CompiledCode()
    except ValueError:
        return []
    places = {(line.file, line.line, line.code) for line in lines}
    modules = {line.module for line in lines} | {""}
    if any((line.file, line.line, line.code) not in places or line.module not in modules for line in kept.lines):
        return []
    return [
        (call.name, [kept.lines[place] for place in call.lines if place < len(kept.lines)], call.operators)
        for graph in kept.graphs
        for call in graph.calls
    ]


def _path(key: str) -> Path | None:
    for name in _PLACES:
        place: Any = getattr(sys.modules.get(name), "cache_dir", None)
        if place is not None and _KEY.fullmatch(key):
            return Path(place()) / _FOLDER / f"{key}.json"
    return None
