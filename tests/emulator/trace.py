"""Writes what a profiler saw of a rank as kineto writes Chrome traces."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec

from tests.emulator.chance import uniform
from tests.emulator.metadata import DEVICE, metadata
from tests.emulator.rank import COMPUTE, Rank
from tests.emulator.spec import Job

EPOCH_NS = 1_751_410_836_000_000_000
UPTIME_NS = 912_340_000_000_000


SETTLING = 1
"""Steps after the first in which the host gets ahead of its device."""


class TraceWriter:
    """One rank's file."""

    def __init__(self, rank: Rank, begin_ns: int, unprofiled_ns: list[int]) -> None:
        self._rank, self._job = rank, rank.job
        self._unprofiled_ns = unprofiled_ns
        self._pid = 4_100 + rank.number
        self._device = rank.number % self._job.ranks_per_host
        self._threads = {"main": self._pid, "autograd": self._pid + 300}
        recording = self._job.recording
        host = self._job.host_of(rank.number)
        where = 2 * uniform(self._job.seed, host, "clock") - 1
        self._offset = UPTIME_NS + round(recording.clock_ns * where)
        self._rate = 1 + recording.drift_ppm * 1e-6 * (2 * uniform(self._job.seed, host, "drift") - 1)
        self._begin_ns = begin_ns

    def write(self, folder: Path) -> Path:
        """Write it."""
        recording, number = self._job.recording, self._rank.number
        if recording.run:
            path = folder / f"rank-{number:05d}.capture-0.trace.json"
            (folder / f"rank-{number:05d}.run.json").write_text(
                json.dumps(metadata(self._rank, path.name, self._unprofiled_ns))
            )
        else:
            host = f"node{self._job.host_of(number)}"
            path = folder / recording.names.format(rank=number, host=host, pid=self._pid)
        # The same JSON as json's, in a sixth of the time.
        path.write_bytes(msgspec.json.encode(self.document()))
        return path

    def document(self) -> dict[str, Any]:
        """The file's content."""
        job, rank = self._job, self._rank
        head: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [_device(number) for number in range(min(job.ranks, job.ranks_per_host))],
            "record_shapes": int(job.recording.shapes),
        }
        if job.ranks > 1:
            head["distributedInfo"] = self._distributed()
        if job.ranks > 1 and job.recording.described:
            head["host_name"] = f"node{job.host_of(rank.number)}"
        if not job.recording.old:
            head["baseTimeNanoseconds"] = EPOCH_NS
        head["traceEvents"] = self._events()
        return head

    def _distributed(self) -> dict[str, Any]:
        job, rank = self._job, self._rank
        found: dict[str, Any] = {"backend": "nccl", "rank": rank.number, "world_size": job.ranks}
        if job.recording.described:
            groups = {group.name: group for group in rank.communicators.values()}
            found["pg_count"] = len(groups)
            found["pg_config"] = [
                {
                    "pg_name": group.name,
                    "pg_desc": group.description,
                    "backend_config": "cuda:nccl",
                    "pg_size": len(group.ranks),
                    "ranks": list(group.ranks),
                }
                for group in groups.values()
            ]
        return found

    def _ts(self, ns: int) -> float | int:
        shown = self._offset + round(ns * self._rate)
        return (EPOCH_NS + shown) // 1000 if self._job.recording.old else shown / 1000

    def _span(self, category: str, name: str, pid: int, tid: int, start: int, end: int, args: Any) -> dict[str, Any]:
        ts, until = self._ts(start), self._ts(end)
        duration = until - ts if self._job.recording.old else round(until - ts, 3)
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": pid,
            "tid": tid,
            "ts": ts,
            "dur": duration,
            "args": args,
        }

    def _flow(self, phase: str, number: int, pid: int, tid: int, ns: int) -> dict[str, Any]:
        more = {"bp": "e"} if phase == "f" else {}
        return {
            "ph": phase,
            "id": number,
            "pid": pid,
            "tid": tid,
            "ts": self._ts(ns),
            "cat": "ac2g",
            "name": "ac2g",
            **more,
        }

    def _events(self) -> list[dict[str, Any]]:
        found = list(self._names())
        for index, call in enumerate(self._rank.calls):
            if call.name.startswith("ProfilerStep#") and not self._job.recording.annotated:
                continue
            tid = self._threads[call.thread]
            if call.category == "cuda_runtime":
                args = {"External id": call.number, "cbid": 211, "correlation": call.number}
                found.append(self._span(call.category, call.name, self._pid, tid, call.start_ns, call.end_ns, args))
                if call.launches:
                    found.append(self._flow("s", call.number, self._pid, tid, call.start_ns))
                continue
            args = {"External id": call.number, **call.args, "Ev Idx": index}
            found.append(self._span(call.category, call.name, self._pid, tid, call.start_ns, call.end_ns, args))
        for work in self._rank.works:
            assert work.start_ns is not None
            assert work.end_ns is not None
            args = {
                "External id": work.external_id,
                "device": self._device,
                "context": 1,
                "stream": work.stream,
                "correlation": work.correlation,
            }
            if work.kind == "kernel":
                args |= {"queued": 0, "grid": [108, 1, 1], "block": [256, 1, 1]}
            span = self._span(
                work.kind, work.name, self._device, work.stream, work.start_ns, work.end_ns, args | work.args
            )
            found.append(span)
            found.append(self._flow("f", work.correlation, self._device, work.stream, work.start_ns))
        return found

    def _names(self) -> list[dict[str, Any]]:
        rows = [
            ("process_name", self._pid, 0, {"name": "python3"}),
            ("process_labels", self._pid, 0, {"labels": "CPU"}),
            ("thread_name", self._pid, self._threads["main"], {"name": f"thread {self._pid} (python3)"}),
            (
                "thread_name",
                self._pid,
                self._threads["autograd"],
                {"name": f"thread {self._pid + 300} (pt_autograd_0)"},
            ),
            ("process_labels", self._device, 0, {"labels": f"GPU {self._device}"}),
            ("thread_name", self._device, COMPUTE, {"name": f"stream {COMPUTE} "}),
        ]
        ts = self._ts(self._begin_ns)
        return [
            {"ph": "M", "name": name, "ts": ts, "pid": pid, "tid": tid, "args": args} for name, pid, tid, args in rows
        ]


def _device(number: int) -> dict[str, Any]:
    memory = {"totalGlobalMem": 85_094_825_984, "computeMajor": 8, "computeMinor": 0, "numSms": 108}
    return {"id": number, "name": DEVICE, **memory}


def write(job: Job, ranks: list[Rank], ends_ns: list[int], folder: Path) -> None:
    """All recorded ranks' files; ``ends_ns`` is when each step has ended."""
    before = ends_ns[SETTLING : job.warmup]
    unprofiled = [end - begin for begin, end in itertools.pairwise(before)]
    for rank in ranks:
        if rank.number not in job.recording.missing:
            TraceWriter(rank, rank.bounds[job.warmup], unprofiled).write(folder)
