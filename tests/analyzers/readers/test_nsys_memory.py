"""Device memory in reports of Nsight Systems, as the driver recorded it."""

from __future__ import annotations

from pathlib import Path

from perfscope.analyzers import readers
from perfscope.trace.trace import NONE
from tests.analyzers.readers.nsys_exports import EPOCH_NS, Export, process_id

DEVICE, PINNED = 2, 1
PID = 100


def export(path: Path, *events: tuple[int, int, int, int, int]) -> Path:
    """A process with one kernel, and memory events as (start, device, bytes, memKind, operation: 1 frees)."""
    made = Export(path)
    made.process(PID, "python")
    made.kernel(PID, "gemm", 10, 90)
    for start, device, size, kind, operation in events:
        made.put(
            "CUDA_GPU_MEMORY_USAGE_EVENTS", start=start, globalPid=process_id(PID), deviceId=device, contextId=1,
            address=start, bytes=size, memKind=kind, memoryOperationType=operation,
        )  # fmt: skip
    return made.close()


def test_what_the_driver_gave_is_reserved(tmp_path: Path) -> None:
    path = export(
        tmp_path / "r.sqlite", (5, 0, 100, DEVICE, 0), (20, 0, 50, DEVICE, 0), (8, 1, 7, DEVICE, 0),
        (30, 0, 100, DEVICE, 1), (25, 0, 999, PINNED, 0),
    )  # fmt: skip
    memory = readers.read(path).memory
    assert (memory.time_ns - EPOCH_NS).tolist() == [5, 8, 20, 30]
    assert memory.device.tolist() == [0, 1, 0, 0]
    assert memory.reserved.tolist() == [100, 7, 150, 50]
    assert memory.allocated.tolist() == [NONE] * 4


def test_what_is_freed_without_having_been_allocated_was_there_before(tmp_path: Path) -> None:
    path = export(tmp_path / "r.sqlite", (5, 0, 10, DEVICE, 0), (20, 0, 70, DEVICE, 1), (30, 0, 20, DEVICE, 0))
    assert readers.read(path).memory.reserved.tolist() == [70, 0, 20]


def test_a_report_without_memory_events_has_none(tmp_path: Path) -> None:
    assert len(readers.read(export(tmp_path / "r.sqlite")).memory.time_ns) == 0
