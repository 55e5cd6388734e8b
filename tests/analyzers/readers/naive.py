"""A Chrome trace read the plain way, with ``json``: slow, and simple enough to be trusted."""

from __future__ import annotations

import gzip
import json
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path
from typing import Any, NamedTuple

from perfscope.trace.trace import NONE, Category, Trace

CATEGORY = {
    "cpu_op": "CPU_OP", "Operator": "CPU_OP", "user_annotation": "ANNOTATION", "python_function": "PYTHON",
    "kernel": "KERNEL", "Kernel": "KERNEL", "Memcpy": "MEMCPY", "Memset": "MEMSET",
    "gpu_memcpy": "MEMCPY", "gpu_memset": "MEMSET",
    "gpu_user_annotation": "GPU_ANNOTATION", "cuda_runtime": "RUNTIME", "cuda_driver": "RUNTIME",
    "xpu_runtime": "RUNTIME", "Runtime": "RUNTIME", "cuda_sync": "SYNC",
}  # fmt: skip
ON_DEVICE = ("KERNEL", "MEMCPY", "MEMSET", "GPU_ANNOTATION", "SYNC")
DESCRIBED = ("CPU_OP", "ANNOTATION", "KERNEL", "OTHER")


class Event(NamedTuple):
    """One event, spelled out."""

    category: str
    name: str
    start_ns: int
    duration_ns: int
    pid: str
    tid: str
    device: int
    stream: int
    correlation: int
    external_id: int
    shapes: Any
    types: Any
    inputs: Any


def load(path: Path) -> Any:
    """The file's JSON, with its decimals exact."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data, parse_float=Decimal)


def events(document: Any) -> list[Event]:
    """The complete events of a document in the trace's order."""
    bare = isinstance(document, list)
    base = 0 if bare else int(document.get("baseTimeNanoseconds", 0))
    found = [_event(e, base) for e in (document if bare else document["traceEvents"]) if e.get("ph") == "X"]
    return sorted(found, key=lambda event: (event.start_ns, -event.duration_ns))


def _event(event: dict[str, Any], base: int) -> Event:
    args = event.get("args", {})
    category = CATEGORY.get(event.get("cat", ""), "OTHER")
    if category == "CPU_OP" and str(event.get("name", "")).startswith("ProfilerStep#"):
        category = "ANNOTATION"  # kineto before torch 1.9 wrote steps as operators
    on_device = category in ON_DEVICE
    described = args if category in DESCRIBED else {}
    external_id = NONE if category == "PYTHON" else args.get("External id", args.get("external id", NONE))
    return Event(
        category,
        _clean(event.get("name", "")),
        base + ns(event["ts"]),
        ns(event.get("dur", 0)),
        str(event.get("pid", "")),
        str(event.get("tid", "")),
        int(args.get("device", event.get("pid", NONE))) if on_device else NONE,
        int(args.get("stream", event.get("tid", NONE))) if on_device else NONE,
        int(args.get("correlation", NONE)),
        int(external_id),
        *(_clean(described.get(key)) for key in ("Input Dims", "Input type", "Concrete Inputs")),
    )


def ns(us: Any) -> int:
    """Microseconds, a number or text, as whole nanoseconds."""
    return int((Decimal(us) * 1000).to_integral_value(ROUND_HALF_EVEN))


def _clean(value: Any) -> Any:
    """Without control characters, which would drive a terminal, in its texts."""
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if not isinstance(value, str):
        return value
    return "".join("\ufffd" if (ord(c) < 32 and c not in "\t\n") or ord(c) == 127 else c for c in value)


def spelled_out(trace: Trace) -> list[Event]:
    """The events of a trace in the same form."""

    def value(index: int) -> Any:
        return None if index == NONE else _clean(json.loads(trace.strings[index]))

    return [
        Event(
            Category(trace.category[row]).name,
            trace.name_of(row),
            int(trace.start_ns[row]),
            int(trace.duration_ns[row]),
            trace.threads[trace.thread[row]].pid,
            trace.threads[trace.thread[row]].tid,
            int(trace.device[row]),
            int(trace.stream[row]),
            int(trace.correlation[row]),
            int(trace.external_id[row]),
            value(trace.shapes[row]),
            value(trace.types[row]),
            value(trace.inputs[row]),
        )
        for row in range(len(trace))
    ]
