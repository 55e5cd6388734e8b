"""Tiny files of every kind that is read, and folders of them: what the campaign changes. All made here, in a moment."""

from __future__ import annotations

import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

from perfscope.analyzers.analyze import analyze
from perfscope.recording import paths
from perfscope.recording.history import STAGES, WAITS, Block, pack
from perfscope.reports.page import page
from tests.analyzers.hang import dumps
from tests.analyzers.job.collectives import inspector_logs
from tests.analyzers.readers.nsys_exports import GENERATIONS, Export, Generation
from tests.analyzers.snapshots.allocator import MIB, Allocator, train
from tests.recording.mutations import REST, SETTINGS

_STACKS = """Thread 0x00007f1 (most recent call first):
  File "/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007f2 (most recent call first):
  File "/site/torch/distributed/distributed_c10d.py", line 2806 in all_reduce
  File "/work/train.py", line 12 in step
  File "/work/train.py", line 30 in <module>
"""
_PY_SPY = """Process 4: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 12 (active): "MainThread"
    wait (threading.py:320)
    all_reduce (torch/distributed/distributed_c10d.py:2806)
    <module> (/work/train.py:30)
"""
STACKS = (_STACKS.encode(), _PY_SPY.encode())
_US = 1000
_MARKED = "2026-11-21T09:48:17+00:00"
_EPOCH_NS = 1_795_254_497_000_000_000
"""The same moment."""
Folder = dict[str, bytes]
"""Content by path in the folder."""


def trace(rank: int = 0, world: int = 1, steps: int = 2) -> dict[str, Any]:
    """A trace as ``torch.profiler`` writes it: some twenty events a step, one of most kinds."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "thread 1 (python)"}},
    ]
    for step in range(steps):
        events += _step(step, 1000.0 * step, rank, world)
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85e9, "numSms": 108}],
        "distributedInfo": {
            "backend": "nccl", "rank": rank, "world_size": world, "pg_count": 1,
            "pg_config": [
                {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "pg_size": world,
                 "ranks": list(range(world))}
            ],
            "nccl_version": "2.21.5",
        },
        "record_shapes": 1, "with_stack": 0, "baseTimeNanoseconds": _EPOCH_NS,
        "traceEvents": events,
        "traceName": "trace.json",
    }  # fmt: skip


def _step(step: int, begin: float, rank: int, world: int) -> list[dict[str, Any]]:
    """Loading, a product, a copy, an all-reduce that waits for rank 1, a barrier, a wait for the device, memory."""
    first = 100 * step

    def event(cat: str, name: str, at: float, long: float, tid: int | str = 1, **args: Any) -> dict[str, Any]:
        pid = 0 if cat in ("kernel", "gpu_memcpy", "gpu_user_annotation") else 1
        return {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": pid,
            "tid": tid,
            "ts": begin + at,
            "dur": long,
            "args": args,
        }

    def on_device(
        cat: str, name: str, at: float, long: float, number: int, stream: int = 7, **args: Any
    ) -> dict[str, Any]:
        more = {
            "device": 0,
            "context": 1,
            "stream": stream,
            "correlation": first + number,
            "External id": first + number,
        }
        return event(cat, name, at, long, stream, **more, **args)

    def launch(at: float, number: int, name: str = "cudaLaunchKernel") -> dict[str, Any]:
        return event("cuda_runtime", name, at, 5, correlation=first + number, **{"External id": first + number})

    late = 40.0 * rank
    reduce = {
        "Collective name": "allreduce", "In msg nelems": 4096, "Out msg nelems": 4096, "Group size": world,
        "dtype": "Float", "Process Group Name": "0", "Process Group Description": "default_pg",
        "Process Group Ranks": json.dumps(list(range(world))), "Seq": step,
        "In split size": "[]", "Out split size": "[]",
    }  # fmt: skip
    return [
        event("user_annotation", f"ProfilerStep#{step}", 0, 980),
        event("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 5, 60),
        event("python_function", "train.py(12): step", 70, 800, **{"Python id": first + 1, "Python parent id": None}),
        event("cpu_op", "aten::mm", 80, 40, **{
            "External id": first + 1, "Sequence number": step, "Fwd thread id": 0, "Input Dims": [[64, 64], [64, 64]],
            "Input type": ["float", "float"], "Input Strides": [[64, 1], [64, 1]], "Concrete Inputs": ["", ""]}),
        launch(90, 1),
        on_device("kernel", "ampere_sgemm_128x64_tn", 130, 200, 1, grid=[1, 2, 3], block=[128, 1, 1],
                  **{"registers per thread": 90, "est. achieved occupancy %": 40}),
        launch(140, 2, "cudaMemcpyAsync"),
        on_device("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 335, 20, 2, bytes=16384),
        event("cpu_op", "record_param_comms", 200, 30, **{"External id": first + 3, **reduce}),
        launch(210, 3),
        on_device("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                  360 + late, 140 - late, 3, 20, **reduce),
        on_device("gpu_user_annotation", "nccl:all_reduce", 360 + late, 140 - late, 3, 20),
        event("user_annotation", "Optimizer.step#AdamW.step", 620, 60),
        event("cpu_op", "gloo:barrier", 700, 30, **{"External id": first + 4}),
        event("cuda_runtime", "cudaStreamSynchronize", 740, 30, correlation=first + 5),
        {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": begin + 95, "s": "t",
         "args": {"Total Reserved": 1 << 20, "Total Allocated": 1 << 19, "Bytes": 1 << 16, "Addr": 140000,
                  "Device Id": 0,
                  "Device Type": 1}},
        {"ph": "s", "id": first + 1, "pid": 1, "tid": 1, "ts": begin + 92, "cat": "ac2g", "name": "ac2g"},
        {"ph": "f", "id": first + 1, "pid": 0, "tid": 7, "ts": begin + 130, "cat": "ac2g", "name": "ac2g", "bp": "e"},
    ]  # fmt: skip


def run(rank: int = 0, world: int = 1) -> dict[str, Any]:
    """What one rank wrote beside its trace, with everything that metadata can hold."""
    return {
        "schema": "perfscope.run/1", "rank": rank, "world_size": world, "local_rank": rank, "host": "node0",
        "pid": 100 + rank, "backend": "nccl", "strategies": ["ddp"], "outcome": "finished",
        "steps": {"seen": 40, "batches_per_step": 1.0},
        "device": {"type": "cuda", "index": rank, "name": "NVIDIA A100-SXM4-80GB", "uuid": f"GPU-{rank}"},
        "settings": SETTINGS, "model": {"name": "Net", "parameters": 4096, "parameter_bytes": 16384},
        **REST,
    }  # fmt: skip


def launch() -> dict[str, Any]:
    """What ``perfscope run`` wrote about the command."""
    return {
        "schema": "perfscope.launch/1", "command": ["torchrun", "train.py"], "started_at": _MARKED, "exit_code": 0,
        "options": {"wait": 5, "active": 8}, "problems": [],
    }  # fmt: skip


def steps(rank: int, blocks: int = 2, each: int = 20) -> bytes:
    """A step history; rank 1 is slow in its forward."""
    data = b""
    for block in range(blocks):
        us = [40_000 + 10 * ((block * each + step) % 7) + 4_000 * rank for step in range(each)]
        stages = {name: [1_000 * (1 + at)] * each for at, name in enumerate(STAGES)}
        waits = {name: [100] * each for name in WAITS}
        began = _EPOCH_NS + block * each * 40_000 * _US
        data += pack(Block(0, block * each, began, us, stages, bytes(each), waits if block % 2 else None))
    return data


def samples(ranks: int = 1) -> bytes:
    """What a sampler wrote about a host with one device."""
    lines: list[Any] = [
        {
            "schema": "perfscope.samples/1", "host": "node0", "cores": 8, "cores_physical": 4, "cores_quota": 2.0,
            "memory_bytes": 64 << 30,
            "devices": [{"index": 0, "name": "A100", "uuid": "GPU-0", "memory_bytes": 40 << 30, "sm_mhz_max": 1410}],
            "host_columns": ["user_ms", "idle_ms", "memory_used_bytes"],
            "device_columns": ["utilisation", "memory_used_bytes", "power_mw", "sm_mhz"],
            "process_columns": ["cpu_ms", "threads", "memory_bytes"],
        },
        *({"process": 100 + rank, "rank": rank, "kind": "rank", "cores": "0-3"} for rank in range(ranks)),
        {"problem": "no power readings"},
    ]  # fmt: skip
    for count in range(6):
        rows = [[100 + rank, 10 * count, 4, 10**9] for rank in range(ranks)]
        lines.append(
            [_EPOCH_NS + (count - 1) * 500 * _US, [100 * count, 50 * count, 10**9], [[50, 10**9, 300, 1400]], rows]
        )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def flights(ranks: int = 3) -> dict[int, dict[str, Any]]:
    """Flight-recorder dumps of a job whose last rank did not come to a collective."""
    groups: dumps.Groups = {"10": ("default_pg", range(ranks)), "28": ("DP", range(ranks))}
    frames = [{"name": f"call_{depth}", "filename": "/site/train.py", "line": depth} for depth in range(3)]
    own = [dumps.op(("10", "28")[n % 2], n // 2 + 1, at_ms=n, size=(n + 1,), frames=frames) for n in range(4)]
    last = dumps.op("10", 3, at_ms=12, state="started", retired=False)
    send = dumps.op("28", 1, "send 0->1", at_ms=9)
    return {
        rank: dumps.document(groups, own if rank == ranks - 1 else [*own, send, last], rank) for rank in range(ranks)
    }


def snapshot() -> dict[str, Any]:
    """A memory snapshot of two steps that leak."""
    allocator = Allocator()
    train(allocator, 2, layers=1, leak=MIB)
    return allocator.document()


def inspector(rank: int) -> bytes:
    """A log of NCCL Inspector."""
    lines = [inspector_logs.line(rank, number, 100.0 + number) for number in range(4)]
    lines.append(inspector_logs.line(rank, 9, 50.0, operation="Send"))
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def export(generation: Generation = "2026") -> bytes:
    """An Nsight Systems export of two ranks with a step each."""
    with tempfile.TemporaryDirectory() as folder:
        made = Export(Path(folder, "report.sqlite"), generation)
        made.machine("Hostname", "node0")
        made.put("TARGET_INFO_GPU", vmId=1, id=0, name="NVIDIA A100", totalMemory=85 << 30)
        for rank in range(2):
            pid = 20_000 + rank
            made.process(pid, "python3.11")
            made.nvtx(pid, pid, f"perfscope::rank#{rank} of 2", 1_000, None, kind=34)
            for step in range(2):
                at = 10_000 + 1_000_000 * step
                made.nvtx(pid, pid, f"ProfilerStep#{step}", at, at + 900_000, registered=True)
                made.nvtx(pid, pid, "aten::mm, seq = 1, op_id = 3, sizes = [[64, 64], [64, 64]]", at + 5, at + 50_000)
                made.call(pid, pid, "cudaLaunchKernel_v7000", at + 10_000, at + 15_000, 10 * step + 1)
                made.kernel(pid, "ampere_sgemm(float*)", at + 60_000, at + 300_000, (rank, 7), 10 * step + 1)
                made.call(pid, pid, "cudaLaunchKernel_v7000", at + 20_000, at + 25_000, 10 * step + 2)
                made.kernel(pid, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", at + 310_000, at + 500_000, (rank, 9),
                            10 * step + 2)  # fmt: skip
                made.copy(pid, at + 510_000, at + 520_000, (1, 1, 2), (rank, 7), 10 * step + 3)
                made.fill(pid, at + 520_000, at + 525_000, (rank, 7), 10 * step + 4)
                made.sync(pid, 3, at + 530_000, at + 600_000, 7)
                made.os_call(pid, pid, "poll", at + 610_000, at + 620_000)
        return made.close().read_bytes()


EXPORTS = tuple(export(generation) for generation in GENERATIONS)


def recording(world: int = 2) -> Folder:
    """What ``perfscope run`` leaves: everything that a recording may hold."""
    held: Folder = {paths.LAUNCH_FILE: json.dumps(launch()).encode(), "host-node0.samples.jsonl": samples(world)}
    for rank in range(world):
        held[f"rank-{rank:05d}.run.json"] = json.dumps(run(rank, world)).encode()
        held[f"rank-{rank:05d}.capture-0.trace.json"] = json.dumps(trace(rank, world)).encode()
        held[f"rank-{rank:05d}.steps.bin"] = steps(rank)
    return held


def histories(world: int = 2) -> Folder:
    """What ``perfscope run --steps-only`` leaves."""
    return {name: data for name, data in recording(world).items() if ".capture-" not in name}


def stuck(ranks: int = 3) -> Folder:
    """Dumps and stacks of a job that stands still."""
    held = {f"nccl_trace_rank_{rank}": pickle.dumps(made, 2) for rank, made in flights(ranks).items()}
    return {**held, "rank-00000.stacks.txt": STACKS[0]}


def write(held: Folder, folder: Path) -> Path:
    """Put the files into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in held.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def summary() -> tuple[bytes, bytes]:
    """(the JSON of a job's summary, its page)."""
    with tempfile.TemporaryDirectory() as folder:
        found = analyze(write(recording(2), Path(folder, "recording")), workers=1)
        return json.dumps(found.to_dict()).encode(), page.render(found).encode()
