"""Recordings of several roles with planted turns: writes traces as kineto does, and knows who waited for whom.

Shares no code with the product: what is true is counted on a grid of 10 µs.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

BASE_US = 1_700_000_000_000_000
GRID_US = 10

Turns = list[tuple[int, int]]
"""Begin and end in µs of each stretch of work."""


@dataclass
class Process:
    """One process: when it works, and as which rank."""

    role: str
    turns: Turns
    rank: int = 0
    world: int = 1
    pid: int = 100
    device: int | None = None
    """Its work is kernels on this device; None: operators on its CPU."""
    name: str = ""
    """A range of the user's around each turn."""
    marked: bool = False
    """Every turn ends a step of the profiler's schedule."""
    reduces: Turns = field(default_factory=list)
    """All-reduces (gloo) within its turns."""

    def write(self, path: Path) -> None:
        """The trace of this process."""
        path.parent.mkdir(parents=True, exist_ok=True)
        document: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [] if self.device is None else [{"id": self.device, "name": "A100"}],
            "traceEvents": list(self._events()),
        }
        if self.world > 1:
            backend = "gloo" if self.device is None else "nccl"
            document["distributedInfo"] = {"backend": backend, "rank": self.rank, "world_size": self.world}
        path.write_text(json.dumps(document))

    def _events(self) -> list[dict[str, Any]]:
        events = []
        for number, (start, end) in enumerate(self.turns):
            if self.name:
                events.append(self._event("user_annotation", self.name, start, end))
            if self.marked:
                begin = self.turns[number - 1][1] if number else start
                events.append(self._event("user_annotation", f"ProfilerStep#{number + 3}", begin, end))
            for at in range(start, end, 1000):
                length = min(1000, end - at)
                if self.device is None:
                    events.append(self._event("cpu_op", "aten::mm", at, at + length))
                    continue
                key = {"correlation": len(events) + 1}
                events.append(self._event("cuda_runtime", "cudaLaunchKernel", at, at + 5, **key))
                work = {**key, "device": self.device, "stream": 7}
                events.append({**self._event("kernel", "gemm", at, at + length, **work), "pid": self.device, "tid": 7})
        events += [{**self._event("user_annotation", "gloo:all_reduce", *each), "tid": 9} for each in self.reduces]
        return events

    def _event(self, category: str, name: str, start: int, end: int, **args: Any) -> dict[str, Any]:
        return {
            "ph": "X", "cat": category, "name": name, "pid": self.pid, "tid": self.pid, "ts": BASE_US + start,
            "dur": end - start, "args": args,
        }  # fmt: skip


def in_turns(seed: int, *, rollouts: int = 2, iterations: int = 12, update_us: int = 20_000) -> dict[str, list[Turns]]:
    """Turns of ``rollouts`` processes that generate and of one that updates, one after the other, with hand-overs."""
    chance = random.Random(seed)
    turns: dict[str, list[Turns]] = {"rollout": [[] for _ in range(rollouts)], "learner": [[]]}
    now = 0
    for _ in range(iterations):
        ends = []
        for mine in turns["rollout"]:
            length = chance.randrange(30_000, 90_000, GRID_US)
            mine.append((now, now + length))
            ends.append(now + length)
        begin = max(ends) + chance.randrange(500, 3000, GRID_US)
        end = begin + chance.randrange(update_us, 2 * update_us, GRID_US)
        turns["learner"][0].append((begin, end))
        now = end + chance.randrange(500, 3000, GRID_US)
    return turns


def on_grid(turns: list[Turns], start_us: float, end_us: float) -> np.ndarray[Any, Any]:
    """For each grid cell of the window: does any of these processes work?"""
    cells = np.arange(start_us, end_us, GRID_US) + GRID_US / 2
    busy = np.zeros(len(cells), dtype=bool)
    for mine in turns:
        for start, end in mine:
            busy |= (cells >= start) & (cells < end)
    return busy
