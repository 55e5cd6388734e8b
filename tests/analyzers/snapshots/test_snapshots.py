"""Memory snapshots of a simulated allocator: the peak, its holders, growth, idle memory and failures, as they were."""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest

from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.readers import snapshot as reader
from perfscope.analyzers.snapshots.job_snapshots import of_snapshot
from perfscope.results.memory.snapshots import MemorySnapshots
from tests.analyzers.snapshots import allocator as simulated
from tests.analyzers.snapshots.allocator import GIB, LEAK, MIB, Allocator, OutOfMemory, train


def read(allocator: Allocator, last: int | None = None, capacity: int | None = None) -> MemorySnapshots:
    return of_snapshot(reader.parse(pickle.dumps(allocator.document(last))), 0, capacity)


def test_the_peak_and_who_holds_it() -> None:
    allocator = Allocator()
    train(allocator)
    found = read(allocator)
    (device,) = found.devices
    assert device.peak_bytes == allocator.peak
    assert device.allocated_bytes == allocator.allocated
    assert device.reserved_bytes == allocator.reserved
    held: dict[str, int] = defaultdict(int)
    for row in found.holders:
        held[row.phase] += row.bytes
    truth = {
        phase: sum(size for size, frames in allocator.at_peak.values() if frames is stack)
        for phase, stack in (("setup", simulated.SETUP), ("forward", simulated.FORWARD), ("backward", []))
    }
    assert held["setup"] == truth["setup"]
    assert held["forward"] == truth["forward"]
    assert held["optimizer"] == sum(s for s, f in allocator.at_peak.values() if f is simulated.STATES)
    assert sum(held.values()) == allocator.peak
    assert sum(row.share for row in found.holders) == pytest.approx(1)
    forward = next(row for row in found.holders if row.phase == "forward")
    assert forward.module == "model.py:30 › linear:134"
    assert (forward.function, forward.line) == ("forward", 30)
    assert forward.kept_bytes == 0
    states = next(row for row in found.holders if row.phase == "optimizer")
    assert states.kept_bytes == states.bytes == 8 * 24 * MIB
    assert states.allocations == 8


def test_torch_s_own_functions_agree_about_what_is_allocated() -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    allocator = Allocator(2 * GIB)
    with suppress(OutOfMemory):
        train(allocator, 20, leak=30 * MIB)
    document = allocator.document()
    device = read(allocator).devices[0]
    assert device.allocated_bytes + device.rounding_bytes == sum(map(viz.calc_active, document["segments"]))
    said = viz.segsum(document)  # raises where segments and blocks do not add up
    assert f"total_reserved: {viz.Bytes(device.reserved_bytes)!r}" in said
    assert f"total_allocated: {viz.Bytes(device.allocated_bytes)!r}" in said
    free = device.split_bytes + device.cached_bytes + device.rounding_bytes
    assert f"total_free: {viz.Bytes(free)!r}" in said
    with redirect_stdout(io.StringIO()) as complaints:
        left = viz.filter_alloc_free_pairs(document)["device_traces"][0]
    assert complaints.getvalue() == ""
    assert sum(event["size"] for event in left if event["action"] == "alloc") == device.allocated_bytes


@pytest.mark.parametrize("leak", [0, 3 * MIB])
def test_what_grows_is_found_and_nothing_else(leak: int) -> None:
    allocator = Allocator()
    train(allocator, leak=leak)
    found = read(allocator)
    assert found.devices[0].steps == 8
    if not leak:
        assert found.growth == ()
        return
    (row,) = found.growth
    assert (row.function, row.line) == ("remember", LEAK[1]["line"])
    assert row.bytes_per_step == leak
    assert (row.first_bytes, row.last_bytes, row.steps) == (leak, 7 * leak, 6)


def test_few_steps_show_no_growth() -> None:
    allocator = Allocator()
    train(allocator, 4, leak=MIB)
    assert read(allocator).growth == ()


def test_steps_are_those_of_the_profiler_where_they_are_recorded() -> None:
    allocator = Allocator()
    train(allocator, 6)
    document = allocator.document()
    times = [entry["time_us"] for entry in allocator.trace]
    document["external_annotations"] = [
        {"name": name, "stage": stage, "device": 0, "time_us": times[at]}
        for at in (5, 20, 35)
        for name in ("ProfilerStep#1", "other")
        for stage in ("START", "END")
    ]
    assert of_snapshot(reader.parse(pickle.dumps(document))).devices[0].steps == 3


def test_a_ring_buffer_that_lost_the_beginning_changes_no_total() -> None:
    allocator = Allocator()
    train(allocator)
    whole, cut = read(allocator), read(allocator, last=30)
    assert cut.devices[0].actions == 30
    assert cut.devices[0].allocated_bytes == whole.devices[0].allocated_bytes
    # The last step fits in: its peak is the job's, and blocks still tell who holds them.
    assert cut.devices[0].peak_bytes == whole.devices[0].peak_bytes
    assert {row.phase for row in cut.holders} == {"setup", "forward", "backward", "optimizer"}


def test_without_history_the_state_is_what_is_known() -> None:
    allocator = Allocator(history=False)
    train(allocator)
    found = read(allocator)
    (device,) = found.devices
    assert device.actions == device.steps == 0
    assert device.peak_bytes == device.allocated_bytes == allocator.allocated
    assert device.fragmentation is None
    assert found.timelines == ()
    assert {row.phase for row in found.holders} == {"setup", "optimizer"}


def test_the_timeline_reaches_the_peak() -> None:
    allocator = Allocator()
    train(allocator, 200)
    found = read(allocator)
    (curve,) = found.timelines
    sums = [sum(values) for values in zip(*curve.allocated_bytes.values(), strict=True)]
    assert max(sums) == allocator.peak
    assert sums[-1] == allocator.allocated
    assert max(curve.reserved_bytes) == found.devices[0].reserved_peak_bytes
    assert len(sums) <= 301
    assert curve.is_timed


def failing(fill: int, request: int, capacity: int = 8 * GIB) -> Allocator:
    allocator = Allocator(capacity)
    for _ in range(fill // (100 * MIB)):
        allocator.alloc(100 * MIB, simulated.FORWARD)
    with pytest.raises(OutOfMemory):
        allocator.alloc(request, simulated.FORWARD)
    return allocator


def test_a_full_device() -> None:
    (row,) = read(failing(8 * GIB, GIB)).ooms
    assert row.cause == "full"
    assert row.requested_bytes == GIB
    assert row.allocated_bytes == row.reserved_bytes == 81 * 100 * MIB
    assert row.device_free_bytes == 8 * GIB - row.reserved_bytes
    assert row.phase == "forward"


def test_a_request_that_is_too_large_for_any_device() -> None:
    assert read(failing(0, 9 * GIB)).ooms[0].cause == "request"


def test_other_users_of_the_device() -> None:
    allocator = failing(4 * GIB, GIB, capacity=4 * GIB)
    assert read(allocator, capacity=8 * GIB).ooms[0].cause == "others"
    assert read(allocator, capacity=4 * GIB).ooms[0].cause == "full"


def test_free_pieces_that_are_too_small() -> None:
    allocator = Allocator(4 * GIB)
    # Halves of segments of 20 MiB stay in use.
    held = [allocator.alloc(9 * MIB, simulated.FORWARD) for _ in range(2 * (4 * GIB // (20 * MIB)))]
    for address in held[::2]:
        allocator.free(address)
    with pytest.raises(OutOfMemory):
        allocator.alloc(200 * MIB, simulated.FORWARD)
    found = read(allocator)
    assert found.ooms[0].cause == "fragmentation"
    (device,) = found.devices
    assert device.split_bytes == device.reserved_bytes - device.allocated_bytes
    assert device.largest_free_bytes == 9 * MIB
    assert device.cached_bytes == 0


def test_a_free_whose_completion_alone_was_recorded() -> None:
    allocator = Allocator()
    train(allocator, 3)
    document = allocator.document()
    trace = document["device_traces"][0]
    document["device_traces"][0] = [entry for entry in trace if entry["action"] != "free_requested"]
    found = of_snapshot(reader.parse(pickle.dumps(document)))
    assert found.devices[0].peak_bytes == allocator.peak


def test_a_folder_of_snapshots_and_a_file_that_is_none(tmp_path: Path) -> None:
    for rank in range(2):
        allocator = Allocator()
        train(allocator, leak=rank * 2 * MIB)
        allocator.dump(tmp_path / f"rank{rank}_memory_snapshot.pickle")
    (tmp_path / "rank2_memory_snapshot.pickle").write_bytes(b"\x80\x04}\x94(\x8c\x08segments\x94cos\nsystem\n")
    summary = analyze(tmp_path)
    assert summary.job.ranks == (0, 1)
    assert summary.snapshots is not None
    assert [row.rank for row in summary.snapshots.devices] == [0, 1]
    (failure,) = summary.job.failures
    assert failure.rank == 2
    assert "not plain data" in failure.error
    assert "Rank 1's memory grows by 2.00 MiB per step" in summary.verdict.headline


def test_folders_of_several_steps_as_torchtitan_writes_them(tmp_path: Path) -> None:
    for step in (10, 20):
        folder = tmp_path / f"iteration_{step}"
        folder.mkdir()
        allocator = Allocator()
        train(allocator, step // 5)
        allocator.dump(folder / "rank0_memory_snapshot.pickle")
    summary = analyze(tmp_path)
    assert summary.snapshots is not None
    assert [Path(row.file).parent.name for row in summary.snapshots.devices] == ["iteration_20"]
