"""Writes a rank's simulation as kineto writes a Chrome trace: same keys, same spellings, µs with three decimals."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Sequence
from typing import Any

from tests.generator.clocks import clock_of
from tests.generator.engine import Host, HostEvent
from tests.generator.spec import JobSpec
from tests.generator.work import Work

BASE_NS = 1_711_964_646_000_000_000
"""``baseTimeNanoseconds``: an epoch time; events are relative to it."""
ORIGIN_NS = 4_458_676_000_000_000
"""Where the simulation's zero lies after the base, as on a host that has been up for weeks."""

_CATEGORIES = {"compute": "kernel", "comm": "kernel", "copy": "gpu_memcpy", "memset": "gpu_memset"}
_SHADOWED = ("nccl:", "Optimizer.", "ProfilerStep#")
"""Ranges whose shadow on the device is written (``gpu_user_annotation``)."""


def pid(rank: int) -> int:
    """A rank's process id."""
    return 20_000 + rank


def finished_ms(spec: JobSpec, host: Host) -> int:
    """When a rank's trace is complete by its own clock, ms since the epoch."""
    return (BASE_NS + ORIGIN_NS + clock_of(spec, host.rank).shows(host.now)) // 1_000_000


def document(spec: JobSpec, host: Host) -> str:
    """The whole trace of one rank as JSON text."""
    return _Writer(spec, host).document()


class _Writer:
    def __init__(self, spec: JobSpec, host: Host) -> None:
        self._spec = spec
        self._host = host
        self._clock = clock_of(spec, host.rank)
        self._device = spec.device_of(host.rank)
        self._pid = pid(host.rank)
        self._threads = {
            "main": self._pid,
            "autograd": self._pid + 500,
            "gloo 0": self._pid + 700,
            "gloo 1": self._pid + 702,
        }
        recorded = set(spec.recorded_steps)
        self._events = [event for event in host.events if event.step in recorded]
        begun = min(event.start_ns for event in self._events)
        # What the device still had to do when the recording began is in it too, without the calls that launched it.
        self._works = [
            work
            for stream in host.streams.values()
            for work in stream.works
            if work.step in recorded or (spec.backend == "nccl" and work.ended > begun)
        ]
        self._recorded = recorded
        self._quoted: dict[str, str] = {}
        self._written: dict[str, str] = {}

    def document(self) -> str:
        head = {"schemaVersion": 1, "deviceProperties": self._devices(), "record_shapes": 1, **self._distributed()}
        tail = {"traceName": f"rank{self._host.rank}.json", "displayTimeUnit": "ms", "baseTimeNanoseconds": BASE_NS}
        body = ",\n  ".join(self._lines())
        return f'{json.dumps(head)[:-1]},\n  "traceEvents": [\n  {body}\n  ],\n  {json.dumps(tail)[1:]}\n'

    def _devices(self) -> list[dict[str, Any]]:
        if self._spec.backend == "gloo":
            return []
        memory = 85_094_825_984
        return [
            {
                "id": i,
                "name": self._spec.device_name,
                "totalGlobalMem": memory,
                "computeMajor": 8,
                "computeMinor": 0,
                "numSms": 108,
            }
            for i in range(min(self._spec.ranks, self._spec.ranks_per_host))
        ]

    def _distributed(self) -> dict[str, Any]:
        spec = self._spec
        if spec.ranks == 1:
            return {}
        backends = "cuda:nccl" if spec.backend == "nccl" else "cpu:gloo,cuda:gloo"
        groups = [
            {
                "pg_name": group.name,
                "pg_desc": group.description,
                "backend_config": backends,
                "pg_size": len(group.ranks),
                "ranks": list(group.ranks),
            }
            for group in spec.groups_of(self._host.rank).values()
        ]
        info: dict[str, Any] = {
            "backend": spec.backend,
            "rank": self._host.rank,
            "world_size": spec.ranks,
            "pg_count": len(groups),
            "pg_config": groups,
        }
        if spec.backend == "nccl":
            info["nccl_version"] = "2.21.5"
        return {"distributedInfo": info, "host_name": spec.host_name(self._host.rank)}

    def _lines(self) -> Iterator[str]:
        yield from self._naming()
        for index, event in enumerate(self._events):
            yield from self._host_event(index, event)
        for work in self._works:
            yield from self._work(work)
        if self._spec.backend == "nccl":
            yield from self._shadows()

    def _shows(self, ns: int) -> int:
        return ORIGIN_NS + self._clock.shows(ns)

    def _quote(self, name: str) -> str:
        known = self._quoted.get(name)
        if known is None:
            known = self._quoted[name] = json.dumps(name)
        return known

    def _complete(self, cat: str, name: str, pid: int, tid: int, start: int, end: int, args: str) -> str:
        """``args``: the text of an object, without its braces."""
        first = self._shows(start)
        dur = self._shows(end) - first
        return (
            f'{{"ph": "X", "cat": "{cat}", "name": {self._quote(name)}, "pid": {pid}, "tid": {tid}, '
            f'"ts": {first // 1000}.{first % 1000:03d}, "dur": {dur // 1000}.{dur % 1000:03d}, "args": {{{args}}}}}'
        )

    def _members(self, args: dict[str, Any]) -> str:
        """The text of an object, without its braces. Operators of one layer have the same in each step."""
        shown = repr(args)
        known = self._written.get(shown)
        if known is None:
            known = self._written[shown] = json.dumps(args)[1:-1]
        return known

    def _flow(self, phase: str, number: int, pid: int, tid: int, time: int) -> str:
        end = ', "bp": "e"' if phase == "f" else ""
        return (
            f'{{"ph": "{phase}", "id": {number}, "pid": {pid}, "tid": {tid}, '
            f'"ts": {_us(self._shows(time))}, "cat": "ac2g", "name": "ac2g"{end}}}'
        )

    def _host_event(self, index: int, event: HostEvent) -> Iterator[str]:
        tid = self._threads[event.thread]
        if event.kind == "cuda_runtime":
            args = f'"External id": {event.external_id}, "cbid": 211, "correlation": {event.correlation}'
            yield self._complete(event.kind, event.name, self._pid, tid, event.start_ns, event.end_ns, args)
            if "Launch" in event.name or "Memcpy" in event.name:
                yield self._flow("s", event.correlation, self._pid, tid, event.start_ns)
            if event.name == "cudaStreamSynchronize":
                # The wait's shadow on the device: it lies over idle time and is no work.
                args = (
                    f'"cuda_sync_kind": "Stream Sync", "stream": 7, "correlation": {event.correlation}, '
                    f'"device": {self._device}, "context": 1'
                )
                yield self._complete("cuda_sync", "Stream Sync", self._device, 7, event.start_ns, event.end_ns, args)
            return
        own_args = f"{self._members(event.args)}, " if event.args else ""
        args = f'"External id": {event.external_id}, {own_args}"Ev Idx": {index}'
        yield self._complete(event.kind, event.name, self._pid, tid, event.start_ns, event.end_ns, args)

    def _work(self, work: Work) -> Iterator[str]:
        own_args = f", {self._members(work.args)}" if work.args else ""
        if self._spec.backend == "gloo":
            args = f'"External id": {1_000_000 + work.external_id}, "Record function id": 0{own_args}'
            tid = self._threads[f"gloo {work.lane}"]
            yield self._complete("user_annotation", work.name, self._pid, tid, work.started, work.ended, args)
            return
        args = (
            f'"External id": {work.external_id}, "queued": 0, "device": {self._device}, "context": 1, '
            f'"stream": {work.stream}, "correlation": {work.correlation}'
        )
        category = _CATEGORIES[work.kind]
        if category == "kernel":
            args += ', "registers per thread": 96, "shared memory": 0, "grid": [128, 1, 1], "block": [256, 1, 1]'
        yield self._complete(category, work.name, self._device, work.stream, work.started, work.ended, args + own_args)
        if work.step in self._recorded:
            yield self._flow("f", work.correlation, self._device, work.stream, work.started)

    def _shadows(self) -> Iterator[str]:
        """From the first to the last work of a range, idle time between them included."""
        works = sorted(self._works, key=lambda work: work.queued_ns)
        queued = [work.queued_ns for work in works]
        for event in self._events:
            if event.kind != "user_annotation" or not event.name.startswith(_SHADOWED):
                continue
            inside = works[bisect.bisect_left(queued, event.start_ns) : bisect.bisect_right(queued, event.end_ns)]
            for stream in sorted({work.stream for work in inside}):
                mine = [work for work in inside if work.stream == stream]
                start, end = min(work.started for work in mine), max(work.ended for work in mine)
                args = f'"External id": {event.external_id}'
                yield self._complete("gpu_user_annotation", event.name, self._device, stream, start, end, args)

    def _naming(self) -> Iterator[str]:
        names: list[tuple[str, int, int, dict[str, Any]]] = [
            ("process_name", self._pid, 0, {"name": "python3.11"}),
            ("process_labels", self._pid, 0, {"labels": "CPU"}),
            ("thread_name", self._pid, self._pid, {"name": f"thread {self._pid} (python3.11)"}),
        ]
        if self._spec.backend == "nccl":
            autograd, device = self._threads["autograd"], self._device
            used = [number for number, stream in self._host.streams.items() if stream.works]
            names += [
                ("thread_name", self._pid, autograd, {"name": f"thread {autograd} (pt_autograd_{device})"}),
                ("process_name", device, 0, {"name": "python3.11"}),
                ("process_labels", device, 0, {"labels": f"GPU {device}"}),
                *(("thread_name", device, number, {"name": f"stream {number} "}) for number in used),
            ]
        else:
            gloo: Sequence[int] = [tid for name, tid in self._threads.items() if name.startswith("gloo")]
            names += [("thread_name", self._pid, tid, {"name": f"thread {tid} (pt_gloo_runloop)"}) for tid in gloo]
        first = min(event.start_ns for event in self._events)
        for name, pid, tid, args in names:
            ts = _us(self._shows(first))
            yield f'{{"ph": "M", "name": "{name}", "ts": {ts}, "pid": {pid}, "tid": {tid}, "args": {json.dumps(args)}}}'


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"
