"""Writes a rank's simulation as kineto writes a Chrome trace: same keys, same spellings, µs with three decimals."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Sequence
from typing import Any

from tests.generator.engine import Host, HostEvent, Work
from tests.generator.spec import JobSpec

BASE_NS = 1_711_964_646_000_000_000
"""``baseTimeNanoseconds``: an epoch time; events are relative to it."""
ORIGIN_NS = 4_458_676_000_000_000
"""Where the simulation's zero lies after the base, as on a host that has been up for weeks."""

_CATEGORIES = {"compute": "kernel", "comm": "kernel", "copy": "gpu_memcpy", "memset": "gpu_memset"}
_SHADOWED = ("nccl:", "Optimizer.", "ProfilerStep#")
"""Ranges whose shadow on the device is written (``gpu_user_annotation``)."""


def document(spec: JobSpec, host: Host) -> str:
    """The whole trace of one rank as JSON text."""
    return _Writer(spec, host).document()


class _Writer:
    def __init__(self, spec: JobSpec, host: Host) -> None:
        self._spec = spec
        self._host = host
        self._shift = ORIGIN_NS + spec.clock_offsets_ns.get(host.rank, 0)
        self._pid = 20_000 + host.rank
        self._threads = {
            "main": self._pid,
            "autograd": self._pid + 500,
            "gloo 0": self._pid + 700,
            "gloo 1": self._pid + 702,
        }
        recorded = set(spec.recorded_steps)
        self._events = [event for event in host.events if event.step in recorded]
        self._works = [work for stream in host.streams.values() for work in stream.works if work.step in recorded]

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
            for i in range(self._spec.ranks)
        ]

    def _distributed(self) -> dict[str, Any]:
        spec = self._spec
        if spec.ranks == 1:
            return {}
        backends = "cuda:nccl" if spec.backend == "nccl" else "cpu:gloo,cuda:gloo"
        group = {
            "pg_name": "0",
            "pg_desc": "default_pg",
            "backend_config": backends,
            "pg_size": spec.ranks,
            "ranks": list(range(spec.ranks)),
        }
        info: dict[str, Any] = {
            "backend": spec.backend,
            "rank": self._host.rank,
            "world_size": spec.ranks,
            "pg_count": 1,
            "pg_config": [group],
        }
        if spec.backend == "nccl":
            info["nccl_version"] = "2.21.5"
        return {"distributedInfo": info, "host_name": f"node{self._host.rank // 8}"}

    def _lines(self) -> Iterator[str]:
        yield from self._names()
        for index, event in enumerate(self._events):
            yield from self._host_event(index, event)
        for work in self._works:
            yield from self._work(work)
        if self._spec.backend == "nccl":
            yield from self._shadows()

    def _us(self, ns: int) -> str:
        return f"{ns // 1000}.{ns % 1000:03d}"

    def _complete(self, cat: str, name: str, pid: int, tid: int, start: int, end: int, args: dict[str, Any]) -> str:
        ts, dur = self._us(start + self._shift), self._us(end - start)
        return (
            f'{{"ph": "X", "cat": "{cat}", "name": {json.dumps(name)}, "pid": {pid}, "tid": {tid}, '
            f'"ts": {ts}, "dur": {dur}, "args": {json.dumps(args)}}}'
        )

    def _flow(self, phase: str, number: int, pid: int, tid: int, time: int) -> str:
        end = ', "bp": "e"' if phase == "f" else ""
        return (
            f'{{"ph": "{phase}", "id": {number}, "pid": {pid}, "tid": {tid}, '
            f'"ts": {self._us(time + self._shift)}, "cat": "ac2g", "name": "ac2g"{end}}}'
        )

    def _host_event(self, index: int, event: HostEvent) -> Iterator[str]:
        tid = self._threads[event.thread]
        if event.kind == "cuda_runtime":
            args: dict[str, Any] = {"External id": event.external_id, "cbid": 211, "correlation": event.correlation}
            yield self._complete(event.kind, event.name, self._pid, tid, event.start_ns, event.end_ns, args)
            if "Launch" in event.name or "Memcpy" in event.name:
                yield self._flow("s", event.correlation, self._pid, tid, event.start_ns)
            if event.name == "cudaStreamSynchronize":
                # The wait's shadow on the device: it lies over idle time and is no work.
                args = {
                    "cuda_sync_kind": "Stream Sync",
                    "stream": 7,
                    "correlation": event.correlation,
                    "device": self._host.rank,
                    "context": 1,
                }
                yield self._complete("cuda_sync", "Stream Sync", self._host.rank, 7, event.start_ns, event.end_ns, args)
            return
        args = {"External id": event.external_id, **event.args, "Ev Idx": index}
        yield self._complete(event.kind, event.name, self._pid, tid, event.start_ns, event.end_ns, args)

    def _work(self, work: Work) -> Iterator[str]:
        if self._spec.backend == "gloo":
            args = {"External id": 1_000_000 + work.external_id, "Record function id": 0, **work.args}
            tid = self._threads[f"gloo {work.lane}"]
            yield self._complete("user_annotation", work.name, self._pid, tid, work.started, work.ended, args)
            return
        device = self._host.rank
        args = {
            "External id": work.external_id,
            "queued": 0,
            "device": device,
            "context": 1,
            "stream": work.stream,
            "correlation": work.correlation,
        }
        if _CATEGORIES[work.kind] == "kernel":
            args |= {"registers per thread": 96, "shared memory": 0, "grid": [128, 1, 1], "block": [256, 1, 1]}
        yield self._complete(
            _CATEGORIES[work.kind], work.name, device, work.stream, work.started, work.ended, {**args, **work.args}
        )
        yield self._flow("f", work.correlation, device, work.stream, work.started)

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
                args = {"External id": event.external_id}
                yield self._complete("gpu_user_annotation", event.name, self._host.rank, stream, start, end, args)

    def _names(self) -> Iterator[str]:
        names: list[tuple[str, int, int, dict[str, Any]]] = [
            ("process_name", self._pid, 0, {"name": "python3.11"}),
            ("process_labels", self._pid, 0, {"labels": "CPU"}),
            ("thread_name", self._pid, self._pid, {"name": f"thread {self._pid} (python3.11)"}),
        ]
        if self._spec.backend == "nccl":
            rank = self._host.rank
            names += [
                (
                    "thread_name",
                    self._pid,
                    self._threads["autograd"],
                    {"name": f"thread {self._threads['autograd']} (pt_autograd_{rank})"},
                ),
                ("process_name", rank, 0, {"name": "python3.11"}),
                ("process_labels", rank, 0, {"labels": f"GPU {rank}"}),
                *(("thread_name", rank, number, {"name": f"stream {number} "}) for number in self._host.streams),
            ]
        else:
            gloo: Sequence[int] = [tid for name, tid in self._threads.items() if name.startswith("gloo")]
            names += [("thread_name", self._pid, tid, {"name": f"thread {tid} (pt_gloo_runloop)"}) for tid in gloo]
        first = min(event.start_ns for event in self._events)
        for name, pid, tid, args in names:
            ts = self._us(first + self._shift)
            yield f'{{"ph": "M", "name": "{name}", "ts": {ts}, "pid": {pid}, "tid": {tid}, "args": {json.dumps(args)}}}'
