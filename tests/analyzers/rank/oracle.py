"""Sums over a Chrome trace by the plainest means, ``json.load`` and loops, to compare with."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

WORK = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "memset"}


@dataclass(frozen=True)
class Event:
    """One complete event, ns."""

    name: str
    category: str
    start: int
    length: int
    track: tuple[str, str]
    args: dict[str, Any]

    @property
    def end(self) -> int:
        return self.start + self.length


def events(path: Path) -> list[Event]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        document = json.load(file, parse_float=Decimal)
    base = int(document.get("baseTimeNanoseconds", 0))
    found = []
    for raw in document["traceEvents"]:
        if raw.get("ph") == "X" and "dur" in raw:
            start = base + round(raw["ts"] * 1000)
            track = (str(raw["pid"]), str(raw["tid"]))
            args = raw.get("args") or {}
            found.append(Event(raw["name"], raw.get("cat", "").lower(), start, round(raw["dur"] * 1000), track, args))
    return found


def within(everything: list[Event], windows: list[tuple[int, int]]) -> Iterator[tuple[int, Event]]:
    """(index of the window, event) of the events that begin inside one."""
    for event in everything:
        for index, (start, end) in enumerate(windows):
            if start <= event.start < end:
                yield index, event


def device_work(everything: list[Event], windows: list[tuple[int, int]]) -> dict[str, list[int]]:
    """Lengths of the device work that begins in the windows, by name."""
    lengths: dict[str, list[int]] = defaultdict(list)
    for _, event in within([event for event in everything if event.category in WORK], windows):
        lengths[event.name].append(event.length)
    return lengths


def launched_by(everything: list[Event], windows: list[tuple[int, int]]) -> dict[str, int]:
    """Length of device work by the operator that its ``External id`` names; of the work that has one."""
    operators = {
        event.args["External id"]: event.name
        for event in everything
        if event.category == "cpu_op" and "External id" in event.args
    }
    total: dict[str, int] = defaultdict(int)
    for _, event in within([event for event in everything if event.category in WORK], windows):
        if (name := operators.get(event.args.get("External id"))) is not None:
            total[name] += event.length
    return total


def own_time(everything: list[Event], windows: list[tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """(calls, own time) of the operators that begin in the windows, by name: a stack for each thread. One in another of
    its name is the same call.
    """
    own: dict[int, int] = {}
    passed_on: set[int] = set()
    kept: dict[int, Event] = {}
    stacks: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    operators = [event for event in everything if event.category in ("cpu_op", "operator")]
    for index, event in enumerate(sorted(operators, key=lambda event: (event.start, -event.length))):
        stack = stacks[event.track]
        while stack and stack[-1][1] <= event.start + event.length // 2:
            stack.pop()
        end = min(event.end, stack[-1][1]) if stack else event.end
        own[index] = end - event.start
        kept[index] = event
        if stack:
            own[stack[-1][0]] -= end - event.start
            if kept[stack[-1][0]].name == event.name:
                passed_on.add(index)
        stack.append((index, end))
    total: dict[str, tuple[int, int]] = {}
    for index, event in kept.items():
        if any(start <= event.start < end for start, end in windows):
            calls, time = total.get(event.name, (0, 0))
            total[event.name] = (calls + (index not in passed_on), time + max(own[index], 0))
    return total
