"""The tensors that operators took, as far as shapes are recorded."""

from __future__ import annotations

import json
from math import prod

from perfscope.analyzers.rank.collectives.communication import DTYPE_BYTES, dtype_of
from perfscope.trace.trace import NONE, Trace


def input_tensors(trace: Trace, row: int) -> tuple[str | None, int]:
    """Type and bytes of all input tensors of a host range; None and NONE where shapes were not recorded."""
    if trace.shapes[row] == NONE or trace.types[row] == NONE:
        return None, NONE
    shapes, types = (json.loads(trace.strings[index]) for index in (trace.shapes[row], trace.types[row]))
    tensors = [shape for shape in _leaves(shapes) if shape]
    dtype = next((known for text in _texts(types) if (known := dtype_of(text))), None)
    if dtype is None or not tensors:
        return dtype, NONE
    return dtype, sum(prod(shape) for shape in tensors) * DTYPE_BYTES[dtype]


def _leaves(shapes: list[object]) -> list[list[int]]:
    """Innermost lists of integers of nested ``Input Dims``."""
    if all(isinstance(item, int) for item in shapes):
        return [shapes]  # type: ignore[list-item]  # just checked
    return [leaf for item in shapes if isinstance(item, list) for leaf in _leaves(item)]


def _texts(types: list[object]) -> list[str]:
    return [
        text for item in types for text in (_texts(item) if isinstance(item, list) else [item]) if isinstance(text, str)
    ]
