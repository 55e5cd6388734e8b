"""What a Chrome trace says by itself: a few lines over its raw events, none of which the product's readers see."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

ON_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")


def events(path: Path) -> list[dict[str, Any]]:
    """All events of the file."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
        return found


def device_spans(every: Iterable[dict[str, Any]]) -> list[tuple[float, float]]:
    """Start and end of all that ran on the device, µs, sorted."""
    return sorted((e["ts"], e["ts"] + e["dur"]) for e in every if e.get("ph") == "X" and e.get("cat") in ON_DEVICE)


def is_step(event: dict[str, Any]) -> bool:
    """Is it torch.profiler's marker of a step?"""
    return str(event.get("name", "")).startswith("ProfilerStep#")


def union(spans: Iterable[tuple[float, float]], low: float, high: float) -> float:
    """Total length of the sorted spans' union inside [low, high]."""
    total, reached = 0.0, low
    for start, end in spans:
        start, end = max(start, reached), min(end, high)
        if end > start:
            total, reached = total + end - start, end
    return total


def busy(path: Path) -> tuple[float, float] | None:
    """From the second recorded step's first kernel to the last one's: time in which the device worked and time in all,
    µs per step.

    A step begins on the device where its marker does there, with its first kernel: a whole number of periods lies
    between two of them, however far the host runs ahead. Without markers there, it begins where the first kernel
    starts in or after the marker on the host. None where the trace holds fewer than three steps or no kernels.
    """
    every = events(path)
    spans = device_spans(every)
    known = _marks(every, "gpu_user_annotation")
    if not known:
        starts = [next((at for at, _ in spans if at >= mark), None) for mark in _marks(every, "user_annotation")]
        known = [at for at in starts if at is not None]
    if len(known) < 3 or known[-1] <= known[1]:
        return None
    steps = len(known) - 2
    return union(spans, known[1], known[-1]) / steps, (known[-1] - known[1]) / steps


def _marks(every: Iterable[dict[str, Any]], category: str) -> list[float]:
    return sorted({event["ts"] for event in every if event.get("cat") == category and is_step(event)})
