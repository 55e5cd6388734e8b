"""Recordings of other projects as other settings of the profiler, and other jobs, would have written them.

In: a trace as JSON; out: another one. Each leaves out, renames or adds what its docstring says.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.real.sheets import CALLS, DEVICE, OPERATORS, category_of

Document = dict[str, Any]
Event = dict[str, Any]

_AMD = {
    "cudaLaunchKernelExC": "hipExtModuleLaunchKernel", "cuLaunchKernel": "hipModuleLaunchKernel",
    "cudaMemcpyAsync": "hipMemcpyWithStream",
}  # fmt: skip
"""Calls whose names differ by more than their prefix."""


def read(path: Path) -> Document:
    document: Document = json.loads(gzip.decompress(path.read_bytes()).decode("utf-8", "replace"), strict=False)
    return document


def written(document: Document | list[Event], folder: Path) -> Path:
    path = folder / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document).encode(), 1))
    return path


def only(document: Document, chosen: Callable[[Event], bool]) -> Document:
    """Some of the events, and all that describes processes and threads."""
    events = [event for event in document["traceEvents"] if event.get("ph") == "M" or chosen(event)]
    return {**document, "traceEvents": events}


def of_device(document: Document) -> Document:
    """Kernels and copies alone."""
    return only(document, lambda event: category_of(event) in DEVICE)


def without_operators(document: Document) -> Document:
    """``activities=[ProfilerActivity.CUDA]``: no operator, no range, so no step either."""
    return only(document, lambda event: category_of(event) in (*DEVICE, *CALLS))


def without_device(document: Document) -> Document:
    """``activities=[ProfilerActivity.CPU]``."""
    found = only(document, lambda event: category_of(event) in (*OPERATORS, "user_annotation", "python_function"))
    return {**found, "deviceProperties": []}


def without_marks(document: Document) -> Document:
    """A loop that does not call ``prof.step()``."""
    return only(document, lambda event: not event.get("name", "").startswith("ProfilerStep#"))


def without_distributed(document: Document) -> Document:
    """No ``distributedInfo``, as before torch 2.1."""
    return {name: value for name, value in document.items() if name != "distributedInfo"}


def without_descriptions(document: Document) -> list[Event]:
    """Events alone, in a list: no names of threads, no device, no version."""
    return [event for event in document["traceEvents"] if event.get("ph") != "M"]


def on_amd(document: Document) -> Document:
    """As ROCm's profiler names calls and collectives."""

    def renamed(event: Event) -> Event:
        name = str(event.get("name", ""))
        if category_of(event) in CALLS:
            return {**event, "name": _AMD.get(name, name.replace("cuda", "hip"))}
        if category_of(event) == "kernel" and "nccl" in name.lower():
            return {**event, "name": "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)"}
        return event

    device = {"id": 0, "name": "AMD Instinct MI250X", "totalGlobalMem": 68702699520, "warpSize": 64, "numSms": 110}
    return {**document, "deviceProperties": [device], "traceEvents": list(map(renamed, document["traceEvents"]))}


def with_loader_process(document: Document) -> Document:
    """Operators of another process too, which prepares batches."""
    operators = [event for event in document["traceEvents"] if category_of(event) in OPERATORS]
    chosen = [event for event in operators[::5] if not event["name"].startswith(("ProfilerStep#", "enumerate"))]
    added = [{**event, "pid": 999_999, "tid": 999_999} for event in chosen]
    return {**document, "traceEvents": [*document["traceEvents"], *added]}


def of_steps(document: Document, first: int, last: int) -> Document:
    """What a profiler would have written of these marked steps alone (by place), which began with an idle device."""
    marks = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in document["traceEvents"]
        if re.fullmatch(r"ProfilerStep#\d+", event.get("name", "")) and not category_of(event).startswith("gpu_")
    )
    return between(document, marks[first][0], marks[last][1])


def between(document: Document, begin: float, end: float) -> Document:
    """What was begun, and launched, in that time."""
    events = [event for event in document["traceEvents"] if "ts" in event]
    calls = [event for event in events if category_of(event) in CALLS and begin <= event["ts"] < end]
    launched = {event["args"]["correlation"] for event in calls if "correlation" in event.get("args", {})}

    def kept(event: Event) -> bool:
        if category_of(event) in DEVICE:
            return event["args"].get("correlation") in launched
        return "ts" in event and bool(begin <= event["ts"] < end)

    return only(document, kept)
