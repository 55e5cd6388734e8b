"""Everything noted of this process's compiled code, and the file that it goes to."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from perfscope.collectors.compiled.annotated import annotated_kernels
from perfscope.collectors.compiled.cost import compile_cost
from perfscope.recording.compiled import (
    AnnotatedNode,
    Annotation,
    CompiledCall,
    CompiledCode,
    CompiledGraph,
    SourceLine,
    save,
)
from perfscope.recording.paths import compiled_file

MOST_GRAPHS: Final = 5000
"""A process that compiles more compiles without end, for ever new shapes."""


class CompiledNames:
    """Graphs in the order in which they became ready; each source line once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # backwards may be compiled on autograd's thread
        self._lines: dict[SourceLine, int] = {}
        self._graphs: list[CompiledGraph] = []
        self._nodes: dict[int, Annotation] = {}
        """Kernels of CUDA graphs that the program annotated; torch forgets those of graphs that are gone."""
        self._written: tuple[Path, int, int] | None = None

    def add(
        self,
        key: str,
        compile_id: str,
        calls: Iterable[tuple[str, Iterable[SourceLine], tuple[str, ...]]],
        *,
        backward: bool,
        known_from: str,
    ) -> None:
        """A graph is ready: each of its calls has a name, the lines that it computes, and its operators."""
        with self._lock:
            if len(self._graphs) >= MOST_GRAPHS:
                return
            made = tuple(
                CompiledCall(name=name, lines=tuple(dict.fromkeys(map(self._place, lines))), operators=operators)
                for name, lines, operators in calls
            )
            self._graphs.append(
                CompiledGraph(key=key, compile_id=compile_id, backward=backward, known_from=known_from, calls=made)
            )

    def write(self, folder: Path, rank: int) -> None:
        """Write the rank's file where there is anything new. Raises OSError."""
        with self._lock:
            self._nodes |= annotated_kernels()
            now = (folder, len(self._graphs), len(self._nodes))
            if not (self._graphs or self._nodes) or now == self._written:
                return
            nodes = tuple(
                AnnotatedNode(node=node, line=self._place(line), backward=backward)
                for node, (line, backward) in self._nodes.items()
            )
            code = CompiledCode(lines=tuple(self._lines), graphs=tuple(self._graphs), nodes=nodes, cost=compile_cost())
            save(code, compiled_file(folder, rank))
            self._written = now

    def _place(self, line: SourceLine) -> int:
        return self._lines.setdefault(line, len(self._lines))


NAMES: Final = CompiledNames()
"""This process's."""
