"""Traces built by hand: a line an event, times in ns, so that every expected number can be checked by eye."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np

from perfscope.trace.trace import (
    NONE,
    Category,
    CollectiveArgs,
    Device,
    GraphNodes,
    MemoryCounter,
    ProcessGroup,
    Thread,
    Trace,
)

MAIN, AUTOGRAD, RUNLOOP, RUNLOOP_2 = range(4)
"""Host threads of a built trace."""


@dataclass
class TraceBuilder:
    """Collects events; ``build`` makes the Trace. Every call returns the builder: lines chain or stand alone."""

    rank: int | None = 0
    world_size: int | None = 1
    host: str = ""
    device_name: str = "NVIDIA A100-SXM4-80GB"
    groups: tuple[ProcessGroup, ...] = ()
    events: list[dict[str, object]] = field(default_factory=list)

    def event(self, name: str, category: Category, start: int, end: int, **columns: object) -> TraceBuilder:
        """One event over ``[start, end)``."""
        self.events.append({"name": name, "category": category, "start": start, "end": end, **columns})
        return self

    def step(self, number: int, start: int, end: int) -> TraceBuilder:
        return self.event(f"ProfilerStep#{number}", Category.ANNOTATION, start, end)

    def op(self, name: str, start: int, end: int, thread: int = MAIN, **columns: object) -> TraceBuilder:
        return self.event(name, Category.CPU_OP, start, end, thread=thread, **columns)

    def note(self, name: str, start: int, end: int, thread: int = MAIN, **columns: object) -> TraceBuilder:
        return self.event(name, Category.ANNOTATION, start, end, thread=thread, **columns)

    def call(self, name: str, start: int, end: int, correlation: int = NONE, thread: int = MAIN) -> TraceBuilder:
        return self.event(name, Category.RUNTIME, start, end, correlation=correlation, thread=thread)

    def launched(
        self, name: str, launch: int, start: int, end: int, category: Category = Category.KERNEL, stream: int = 7,
        call_takes: int = 1, **columns: object,
    ) -> TraceBuilder:  # fmt: skip
        """Device work over ``[start, end)`` whose launch call began at ``launch``."""
        correlation = len(self.events) + 1
        self.call("cudaLaunchKernel", launch, launch + call_takes, correlation)
        return self.event(name, category, start, end, correlation=correlation, device=0, stream=stream, **columns)

    def build(self) -> Trace:
        """The trace, checked."""
        events = sorted(self.events, key=lambda event: (event["start"], event["start"] - event["end"]))  # type: ignore[operator]
        strings: dict[str, int] = {}

        def symbol(value: object) -> int:
            if value is None:
                return NONE
            text = value if isinstance(value, str) else json.dumps(value)
            return strings.setdefault(text, len(strings))

        def column(key: str, default: int, dtype: type) -> np.ndarray:
            return np.array([event.get(key, default) for event in events], dtype=dtype)

        described = [(row, event["collective"]) for row, event in enumerate(events) if "collective" in event]

        def of_collective(key: str, dtype: type) -> np.ndarray:
            values = [args.get(key) for _, args in described]  # type: ignore[attr-defined]
            if key in ("kind", "group", "ranks", "dtype"):
                values = [symbol(value) for value in values]
            return np.array([NONE if value is None else value for value in values], dtype=dtype)

        start, end = column("start", 0, np.int64), column("end", 0, np.int64)
        name = np.array([symbol(event["name"]) for event in events], dtype=np.int32)
        texts = {key: np.array([symbol(event.get(key)) for event in events], dtype=np.int32) for key in _TEXTS}
        keys = ("kind", "group", "ranks", "dtype")
        collectives = CollectiveArgs(
            row=np.array([row for row, _ in described], dtype=np.int64),
            **{key: of_collective(key, np.int32) for key in keys},
            **{key: of_collective(key, np.int64) for key in _NUMBERS},
        )
        in_graph = [row for row, event in enumerate(events) if "node" in event]
        nodes = np.array([events[row]["node"] for row in in_graph], dtype=np.int64)
        said = np.array([symbol(events[row].get("annotation")) for row in in_graph], dtype=np.int64)
        nothing = np.empty(0, dtype=np.int64)
        trace = Trace(
            source=f"built-rank{self.rank}",
            strings=tuple(strings),
            category=column("category", 0, np.int8),
            name=name,
            start_ns=start,
            duration_ns=end - start,
            thread=column("thread", MAIN, np.int32),
            device=column("device", NONE, np.int32),
            stream=column("stream", NONE, np.int64),
            correlation=column("correlation", NONE, np.int64),
            external_id=column("external_id", NONE, np.int64),
            **texts,
            threads=tuple(Thread("1", str(index), "") for index in range(4)),
            collectives=collectives,
            memory=MemoryCounter(nothing, nothing, nothing, nothing),
            graph_nodes=GraphNodes(np.array(in_graph, dtype=np.int64), nodes, said),
            rank=self.rank,
            world_size=self.world_size,
            host=self.host,
            devices=(Device(0, self.device_name, 80 << 30),),
            groups=self.groups,
        )
        trace.self_check()
        return trace


_TEXTS = ("shapes", "types", "inputs")
_NUMBERS = ("elements_in", "elements_out", "group_size", "sequence", "peer")
