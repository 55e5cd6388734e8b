"""Small hand-written traces on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfscope.analyzers.readers import chrome
from perfscope.trace.trace import Trace

Write = Callable[[Any], Path]


def event(name: str = "op", **fields: Any) -> dict[str, Any]:
    """A complete event of an operator at 1 µs for 2 µs on one thread; ``fields`` replace or add members."""
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 10, "tid": 11, "ts": 1, "dur": 2, **fields}


def save(folder: Path, content: Any, name: str = "trace.json") -> Path:
    """Write text or bytes as they are, and anything else as JSON."""
    path = folder / name
    if not isinstance(content, (str, bytes)):
        content = json.dumps(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(folder: Path, content: Any) -> Trace:
    """Write a trace and read it."""
    trace = chrome.read(save(folder, content))
    trace.self_check()
    return trace


def names(trace: Trace) -> list[str]:
    """The names of the events, in the trace's order."""
    return [trace.name_of(row) for row in range(len(trace))]


def differences(first: Any, second: Any, where: str = "trace") -> list[str]:
    """Paths of the values in which two traces differ."""
    if is_dataclass(first) and not isinstance(first, type):
        values = [(field.name, getattr(first, field.name), getattr(second, field.name)) for field in fields(first)]
        return [line for name, one, other in values for line in differences(one, other, f"{where}.{name}")]
    if isinstance(first, np.ndarray):
        return [] if first.dtype == second.dtype and np.array_equal(first, second) else [where]
    return [] if first == second else [where]
