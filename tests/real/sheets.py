"""What a recording shows, from its raw events by the plainest means: ``json`` or ``sqlite3``, lists and loops.

Shares no code with the product. A sheet holds one device (or one rank without a device): where its steps begin and end,
and what ran and waited in them.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import sqlite3
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

Interval = tuple[int, int]
"""[start, end), ns."""

NEVER = 1 << 62
DEVICE = {
    "kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy", "memcpy": "copy", "memset": "copy",
}  # fmt: skip
CALLS = ("cuda_runtime", "cuda_driver", "runtime")
OPERATORS = ("cpu_op", "operator")


@dataclass(frozen=True)
class Work:
    """A kernel, copy or memset; ``called`` is the start of the call that launched it, None where that is not there."""

    start: int
    end: int
    called: int | None
    kind: str
    name: str
    stream: str

    @property
    def communicates(self) -> bool:
        return self.kind == "kernel" and "nccl" in self.name.lower()


@dataclass(frozen=True)
class Sheet:
    """``marks``: (number, begin, end) of each step on the host; none where nothing marks steps."""

    marks: Sequence[tuple[int, int, int]]
    work: Sequence[Work]
    loading: Sequence[Interval]
    operating: Sequence[Interval]
    """The host is in an operator or a runtime call."""
    host_communication: Sequence[Interval] = ()
    host: Interval | None = None
    """From the first operator, range or function of the threads that train to the end of the last."""

    def windows(self) -> list[Interval]:
        """Whole periods. A step begins when its host has begun it and the device is done with all work of before, but
        no later than its first kernel; the last one ends when both are done with it. A device that is behind its host
        at the first step's end, and idle when the recording begins, idled before that step for as long as before the
        others; before a lone step it was as far behind."""
        if not self.work:
            return [(begin, end) for _, begin, end in self.marks]
        if not self.marks:
            return [self._whole()]
        first = [self._first_kernel(begin, end) for _, begin, end in self.marks]
        hosts = [begin for _, begin, _ in self.marks] + [self.marks[-1][2]]
        edges = [
            min(kernel, max(begin, self._done(begin)))
            for kernel, begin in zip([*first, self._first_kernel(hosts[-1], NEVER)], hosts, strict=True)
        ]
        edges[0] = min(first[0], max(edges[0], self._awaited()))
        behind = max(edges[1] - hosts[1], 0)
        if edges[0] == hosts[0] and behind:
            others = [kernel - edge for kernel, edge in zip(first[1:], edges[1:-1], strict=True)]
            begin = first[0] - int(statistics.median(others)) if others else hosts[0] + behind
            edges[0] = min(first[0], max(hosts[0], begin))
        return [(edges[at], edges[at + 1]) for at, kernel in enumerate(first) if kernel < NEVER]

    def _whole(self) -> Interval:
        """The whole recording."""
        first, last = min(work.start for work in self.work), max(work.end for work in self.work)
        if self.host is None:
            return first, last
        behind = max(last - self.host[1], 0)
        return min(first, max(self.host[0] + behind, self._awaited())), max(last, self.host[1])

    def _first_kernel(self, begin: int, end: int) -> int:
        """Start of the kernel that was launched first in that time."""
        kernels = [work for work in self.work if work.kind == "kernel" and begin <= (work.called or 0) < end]
        return min(kernels, key=lambda work: work.called or 0).start if kernels else NEVER

    def _awaited(self) -> int:
        """When the first copy of all begins whose call blocks for long before that, while nothing recorded runs: until
        then the device did what it was given before the recording."""
        launched = [work for work in self.work if work.called is not None]
        if not launched:
            return 0
        copy = min(launched, key=lambda work: work.called or 0)
        called = copy.called or 0
        alone = all(work.end <= called or work.start >= copy.start for work in self.work)
        return copy.start if "Pageable" in copy.name and alone and copy.start - called >= 500_000 else 0

    def _done(self, time: int) -> int:
        """When all that was launched before was done. What has no launch, nor any before it, precedes recording."""
        known = [work for work in self.work if work.called is not None]
        unknown = [work for work in self.work if work.called is None]
        first = {stream: min(w.start for w in known if w.stream == stream) for stream in {w.stream for w in known}}
        lost = any(work.start > first.get(work.stream, NEVER) for work in unknown)
        earlier = [work for work in known if work.called is not None and work.called < time]
        return max((work.end for work in (*earlier, *(() if lost else unknown))), default=0)

    def starved(self) -> list[Interval]:
        """When the device was idle and the work that it did next had not been launched."""
        following = {work.start: work.called for work in self.work}
        idle = outside(self.running(lambda work: True), self.windows())
        return [gap for gap in idle if (following.get(gap[1]) or NEVER) > gap[0]]

    def running(self, chosen: Callable[[Work], bool]) -> list[Interval]:
        """When any of the chosen work ran."""
        return union((work.start, work.end) for work in self.work if chosen(work))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif end > start:
            joined.append((start, end))
    return joined


def common(one: Iterable[Interval], other: Iterable[Interval]) -> list[Interval]:
    """What is in both; each is a union."""
    first, second, found = list(one), list(other), []
    at = 0
    for start, end in first:
        while at < len(second) and second[at][1] <= start:
            at += 1
        index = at
        while index < len(second) and second[index][0] < end:
            found.append((max(start, second[index][0]), min(end, second[index][1])))
            index += 1
    return found


def outside(intervals: Sequence[Interval], windows: Sequence[Interval]) -> list[Interval]:
    """What of the windows is in none of the intervals (a union)."""
    edges = [(-NEVER, -NEVER), *intervals, (NEVER, NEVER)]
    gaps = [(before[1], after[0]) for before, after in itertools.pairwise(edges)]
    return common(windows, gaps)


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def of_chrome(path: Path) -> Sheet:
    """The sheet of a Chrome trace of one rank."""
    events = [event for event in raw_events(path) if event.get("ph") == "X" and "dur" in event]
    launching = {event["args"].get("correlation") for event in events if category_of(event) in DEVICE}
    calls: dict[Any, int] = {}
    for event in events:
        if category_of(event) in CALLS and "correlation" in event.get("args", {}):
            number = event["args"]["correlation"]
            calls[number] = min(calls.get(number, NEVER), _span(event)[0])
    work = [
        Work(
            *_span(event), calls.get(event["args"].get("correlation")), DEVICE[category_of(event)], event["name"],
            str(event["args"].get("stream", event["tid"])),
        )
        for event in events
        if category_of(event) in DEVICE
    ]  # fmt: skip
    host = [event for event in events if category_of(event) in (*OPERATORS, *CALLS, "user_annotation")]
    marks = sorted(
        (int(event["name"].removeprefix("ProfilerStep#")), *_span(event))
        for event in host
        if re.fullmatch(r"ProfilerStep#\d+", event["name"])
    )
    return Sheet(
        marks=marks,
        work=work,
        loading=union(_span(event) for event in host if event["name"].startswith("enumerate(DataLoader)#")),
        operating=union(
            _span(event) for event in host if category_of(event) != "user_annotation" and "#" not in event["name"]
        ),
        host_communication=union(_span(event) for event in host if event["name"].startswith("gloo:")),
        host=_of_host(events, launching - {None}),
    )


def _of_host(events: Sequence[dict[str, Any]], launching: set[Any]) -> Interval | None:
    """See ``Sheet.host``; the threads that train launch work, or have most operators."""
    threads = {
        _thread(event)
        for event in events
        if category_of(event) in CALLS and event.get("args", {}).get("correlation") in launching
    }
    operators: Counter[Any] = Counter()
    for event in events:
        if category_of(event) in OPERATORS:
            operators[_thread(event)] += _span(event)[1] - _span(event)[0]
    threads |= {thread for thread, _ in operators.most_common(1)}
    kinds = (*OPERATORS, "user_annotation", "python_function")
    spans = [_span(event) for event in events if category_of(event) in kinds and _thread(event) in threads]
    return (min(start for start, _ in spans), max(end for _, end in spans)) if spans else None


def _thread(event: dict[str, Any]) -> tuple[Any, Any]:
    return event["pid"], event["tid"]


def raw_events(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    document = json.loads(text, parse_float=Decimal, strict=False)
    return list(document["traceEvents"])


def category_of(event: dict[str, Any]) -> str:
    """Of an event, whatever the version of kineto."""
    return str(event.get("cat", "")).lower()


def _span(event: dict[str, Any]) -> Interval:
    start = round(Decimal(event["ts"]) * 1000)
    return start, start + round(Decimal(event["dur"]) * 1000)


def of_nsys(path: Path) -> Iterator[Sheet]:
    """A sheet for each device of an export without step ranges."""
    tables = {"KERNEL": "kernel", "MEMCPY": "copy", "MEMSET": "copy"}
    work: dict[int, list[Work]] = {}
    with sqlite3.connect(path) as database:
        names = dict(database.execute("SELECT id, value FROM StringIds"))
        for table, kind in tables.items():
            name = "demangledName" if kind == "kernel" else "NULL"
            query = f"SELECT deviceId, start, end, streamId, {name} FROM CUPTI_ACTIVITY_KIND_{table}"
            for device, start, end, stream, text in database.execute(query):
                work.setdefault(device, []).append(Work(start, end, None, kind, names.get(text, ""), str(stream)))
        # Ranges of the threads that launch kernels; the call that launched each has its correlation id and process.
        ranges = {
            device: (start, end)
            for device, start, end in database.execute(
                "SELECT device, MIN(start), MAX(end) FROM NVTX_EVENTS JOIN (SELECT DISTINCT kernel.deviceId AS device, "
                "call.globalTid AS thread FROM CUPTI_ACTIVITY_KIND_KERNEL AS kernel JOIN CUPTI_ACTIVITY_KIND_RUNTIME "
                "AS call USING (correlationId) WHERE globalPid = globalTid >> 24 << 24) "
                "ON globalTid = thread GROUP BY device"
            )
        }
    for device, own in sorted(work.items()):
        yield Sheet((), own, (), (), host=ranges.get(device))
