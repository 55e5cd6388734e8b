"""TraceLens's GPU timeline, computed by its published definition; no code of TraceLens is used.

AMD distributes TraceLens as source (github.com/AMD-AGI/TraceLens); the package of that name on PyPI is another
project. Where it is installed, ``tests.benchmarks.agreement --tracelens-python PYTHON`` runs its own
``GPUEventAnalyser`` through ``theirs`` below. Otherwise ``by_definition`` follows its documentation, "The gpu_timeline
sheet" in ``docs/reference/tracelens-metrics.md``:

- device events are those of category ``kernel``, ``gpu_memcpy`` and ``gpu_memset``;
- a copy is ``gpu_memcpy``; communication is a kernel whose name contains ``nccl``; everything else, memsets too, is
  computation;
- the events of a class are merged over all streams into disjoint intervals; exposed communication is communication
  minus computation, exposed copies are copies minus computation minus communication;
- the total runs from the first event's start to the last one's end, and what no event covers is idle.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Span = tuple[float, float]

NAMES = {
    "total_time": "total",
    "busy_time": "busy",
    "idle_time": "idle",
    "computation_time": "compute and memsets",
    "total_comm_time": "communication",
    "exposed_comm_time": "exposed communication",
    "total_memcpy_time": "copies",
    "exposed_memcpy_time": "exposed copies",
}
"""TraceLens's name of a quantity -> ours."""


def read(path: Path) -> list[dict[str, Any]]:
    """A trace's events."""
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def by_definition(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """The quantities in µs. Raises ValueError where there is no device event."""
    spans: dict[str, list[Span]] = {"compute": [], "communication": [], "copy": []}
    for event in events:
        category = event.get("cat")
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            name = "copy" if category == "gpu_memcpy" else "compute"
            name = "communication" if category == "kernel" and "nccl" in event["name"] else name
            spans[name].append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    compute, communication, copies = (merged(spans[name]) for name in ("compute", "communication", "copy"))
    everything = merged([*compute, *communication, *copies])
    if not everything:
        raise ValueError("no device events")
    total, busy = everything[-1][1] - everything[0][0], length(everything)
    return {
        "total": total,
        "busy": busy,
        "idle": total - busy,
        "compute and memsets": length(compute),
        "communication": length(communication),
        "exposed communication": length(without(communication, compute)),
        "copies": length(copies),
        "exposed copies": length(without(without(copies, compute), communication)),
    }


def theirs(events: list[dict[str, Any]]) -> dict[str, float]:
    """What TraceLens itself reports; in its own interpreter only."""
    from TraceLens import GPUEventAnalyser

    for number, event in enumerate(events):
        event.setdefault("UID", number)  # newer versions want one, which their trace tree would give
    metrics = GPUEventAnalyser(events).compute_metrics()
    return {ours: float(metrics[name]) for name, ours in NAMES.items()}


def merged(spans: Iterable[Span]) -> list[Span]:
    """Their union as disjoint intervals, ascending."""
    union: list[Span] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def without(spans: list[Span], taken: list[Span]) -> list[Span]:
    """``spans`` minus ``taken``, both disjoint and ascending."""
    left: list[Span] = []
    at = 0
    for start, end in spans:
        while at < len(taken) and taken[at][1] <= start:
            at += 1
        number = at
        while number < len(taken) and taken[number][0] < end:
            if taken[number][0] > start:
                left.append((start, taken[number][0]))
            start = max(start, taken[number][1])
            number += 1
        if start < end:
            left.append((start, end))
    return left


def length(spans: Iterable[Span]) -> float:
    """Total length."""
    return sum(end - start for start, end in spans)


def main() -> int:
    measured: dict[str, Any] = {}
    for path in sys.argv[1:]:
        try:
            measured[path] = theirs(read(Path(path)))
        except (ValueError, KeyError) as error:
            measured[path] = {"error": f"{type(error).__name__}: {error}"}
    json.dump(measured, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
