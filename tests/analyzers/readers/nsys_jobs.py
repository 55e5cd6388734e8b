"""Writes a simulated job as an Nsight Systems report would hold it: all ranks of a host in one export, each a process.

Operators are written as torch's ``emit_nvtx`` writes them, everything else by its own name. What kineto knows and
Nsight Systems does not is left out: sizes and groups of collectives, types of tensors, the operator above a kernel.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.analyzers.readers.nsys_exports import Export, Generation
from tests.generator import Host, Job, Work

ORIGIN_NS = 60_000_000_000
"""Where the simulation's zero lies in the session."""

_COPIES = {"Memcpy HtoD (Pinned -> Device)": (1, 1, 2), "Memcpy DtoH (Device -> Pageable)": (2, 2, 0)}


def write_report(job: Job, path: Path, generation: Generation = "2026") -> Path:
    """Write the recorded steps of all ranks into one export and return it."""
    export = Export(path, generation)
    export.machine("Hostname", "node0")
    for host in job.hosts:
        _write_rank(export, job, host)
    for index in range(job.spec.ranks):
        export.put("TARGET_INFO_GPU", vmId=1, id=index, name=job.spec.device_name, totalMemory=85_094_825_984)
    return export.close()


def _write_rank(export: Export, job: Job, host: Host) -> None:
    pid = 20_000 + host.rank
    shift = ORIGIN_NS + job.spec.clock_offsets_ns.get(host.rank, 0)
    recorded = set(job.spec.recorded_steps)
    threads = {"main": pid, "autograd": pid + 500}
    export.process(pid, "python3.11")
    export.nvtx(pid, pid, f"perfscope::rank#{host.rank} of {job.spec.ranks}", 1_000, None, kind=34)
    events = [event for event in host.events if event.step in recorded]
    for number, event in enumerate(events):
        start, end, tid = event.start_ns + shift, event.end_ns + shift, threads[event.thread]
        if event.kind == "cuda_runtime":
            export.call(pid, tid, f"{event.name}_v11060", start, end, event.correlation)
            continue
        name = event.name
        if event.kind == "cpu_op":
            in_autograd = name.startswith("aten::") or "Backward" in name
            name += f", seq = {number}" if in_autograd else ""
            name += f", op_id = {number + 1}"
            shapes = [shape for shape in event.args.get("Input Dims", []) if all(isinstance(n, int) for n in shape)]
            name += f", sizes = {json.dumps(shapes)}" if shapes else ""
        export.nvtx(pid, tid, name, start, end, registered=number % 3 == 0)
    for stream in host.streams.values():
        for work in stream.works:
            if work.step in recorded:
                _write_work(export, work, pid, shift)


def _write_work(export: Export, work: Work, pid: int, shift: int) -> None:
    start, end, where = work.started + shift, work.ended + shift, (work.rank, work.stream)
    if work.kind == "copy":
        export.copy(pid, start, end, _COPIES[work.name], where, work.correlation)
    elif work.kind == "memset":
        export.fill(pid, start, end, where, work.correlation)
    else:
        export.kernel(pid, work.name, start, end, where, work.correlation)
