"""A real export (schema 3.25, one report over two H100s), against sums that plain SQL takes from the same file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import perfscope
from perfscope.analyzers.rank.launches import device_work
from perfscope.analyzers.readers import detect, nsys
from perfscope.execution.serial import Serial
from perfscope.results.summary import Summary
from perfscope.trace.trace import NONE, Category, Trace

REPORT = Path(__file__).parents[4] / "shared" / "traces" / "nsys_h100_2gpu" / "report.sqlite"
pytestmark = pytest.mark.skipif(not REPORT.exists(), reason="no folder of real traces beside the checkout")

PIDS = (144, 145)


@pytest.fixture(scope="module")
def database() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(f"{REPORT.as_uri()}?mode=ro&immutable=1", uri=True)
    yield connection
    connection.close()


@pytest.fixture(scope="module")
def traces() -> dict[int, Trace]:
    return {found.pid: nsys.read(REPORT, found.part) for found in nsys.ranks(REPORT)}


@pytest.fixture(scope="module")
def summary() -> Summary:
    return perfscope.analyze(REPORT.parent, executor=Serial())


def union_ns(rows: list[tuple[int, int]]) -> int:
    total, end = 0, 0
    for start, stop in sorted(rows):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def test_two_processes_without_a_rank(traces: dict[int, Trace]) -> None:
    assert detect(REPORT) == "nsys-sqlite"
    assert tuple(traces) == PIDS
    assert [(trace.rank, trace.world_size) for trace in traces.values()] == [(None, 2), (None, 2)]  # from torchrun 2


@pytest.mark.parametrize("pid", PIDS)
@pytest.mark.parametrize(
    ("table", "category"),
    [
        ("CUPTI_ACTIVITY_KIND_KERNEL", Category.KERNEL),
        ("CUPTI_ACTIVITY_KIND_MEMCPY", Category.MEMCPY),
        ("CUPTI_ACTIVITY_KIND_MEMSET", Category.MEMSET),
        ("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", Category.SYNC),
    ],
)
def test_every_row_of_the_device(
    database: sqlite3.Connection, traces: dict[int, Trace], pid: int, table: str, category: Category
) -> None:
    trace = traces[pid]
    trace.self_check()
    rows = trace.rows(category)
    of_process = "globalPid / 16777216 % 16777216 = ?"
    query = f"SELECT count(*), sum(end - start), min(start), max(end) FROM {table} WHERE {of_process}"
    count, time, first, last = database.execute(query, (pid,)).fetchone()
    (epoch,) = database.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
    assert (len(rows), int(trace.duration_ns[rows].sum())) == (count, time)
    assert (int(trace.start_ns[rows].min()), int(trace.end_ns[rows].max())) == (epoch + first, epoch + last)


@pytest.mark.parametrize("pid", PIDS)
def test_every_range_and_call_of_the_host(database: sqlite3.Connection, traces: dict[int, Trace], pid: int) -> None:
    trace = traces[pid]
    of_process = "globalTid / 16777216 % 16777216 = ?"
    (ranges,) = database.execute(
        f"SELECT count(*) FROM NVTX_EVENTS WHERE eventType = 59 AND {of_process}", (pid,)
    ).fetchone()
    (calls,) = database.execute(
        f"SELECT count(*) FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE {of_process}", (pid,)
    ).fetchone()
    (copies,) = database.execute(
        f"SELECT count(*) FROM NVTX_EVENTS WHERE (text LIKE 'aten::copy\\_,%' ESCAPE '\\') AND {of_process}", (pid,)
    ).fetchone()
    assert len(trace.rows(Category.CPU_OP, Category.ANNOTATION)) == ranges
    assert len(trace.rows(Category.RUNTIME)) == calls
    operators = trace.rows(Category.CPU_OP)
    assert sum(trace.name_of(int(row)) == "aten::copy_" for row in operators) == copies
    names = {trace.name_of(int(row)) for row in trace.rows(Category.ANNOTATION)}
    assert {"nccl:all_to_all", "ncclGroupStart"} <= names


def test_launches_are_found_within_each_process(database: sqlite3.Connection, traces: dict[int, Trace]) -> None:
    """Ids of both processes overlap: joined without the process, some work would get two launches."""
    for pid, trace in traces.items():
        work = device_work(trace)
        expected = 0
        for table in ("KERNEL", "MEMCPY", "MEMSET"):
            query = (
                f"SELECT count(*) FROM CUPTI_ACTIVITY_KIND_{table} AS work WHERE globalPid / 16777216 % 16777216 = ? "
                "AND EXISTS (SELECT 1 FROM CUPTI_ACTIVITY_KIND_RUNTIME AS call WHERE call.correlationId = "
                "work.correlationId AND call.globalTid / 16777216 = work.globalPid / 16777216)"
            )
            expected += database.execute(query, (pid,)).fetchone()[0]
        launched = work.launch != NONE
        assert int(launched.sum()) == expected > 2500
        assert (trace.start_ns[work.launch[launched]] <= work.start_ns[launched]).all()


def test_the_time_breakdown(database: sqlite3.Connection, summary: Summary) -> None:
    summary.self_check()
    assert summary.job.ranks == (0, 1)
    assert summary.job.backend == "nccl"
    for row, pid in zip(summary.time_breakdown, PIDS, strict=True):
        of_process = "globalPid / 16777216 % 16777216 = ?"
        join = "JOIN StringIds ON StringIds.id = demangledName"
        kernels = f"SELECT start, end FROM CUPTI_ACTIVITY_KIND_KERNEL {join} WHERE {of_process} AND"
        compute = database.execute(f"{kernels} value NOT LIKE 'nccl%'", (pid,)).fetchall()
        communication = database.execute(f"{kernels} value LIKE 'nccl%'", (pid,)).fetchall()
        memory = [
            span
            for table in ("MEMCPY", "MEMSET")
            for span in database.execute(
                f"SELECT start, end FROM CUPTI_ACTIVITY_KIND_{table} WHERE {of_process}", (pid,)
            )
        ]
        everything = compute + communication + memory
        # The recording is one step, from the first range of the host or work of the device to the last.
        of_thread = of_process.replace("Pid", "Tid")
        ranges = database.execute(f"SELECT start, end FROM NVTX_EVENTS WHERE {of_thread}", (pid,))
        spans = everything + [(start, end) for start, end in ranges if end is not None]
        extent = max(end for _, end in spans) - min(start for start, _ in spans)
        assert row.step_time_us == pytest.approx(extent / 1e3)
        assert row.compute_us == pytest.approx(union_ns(compute) / 1e3)
        assert row.comm_us == pytest.approx(union_ns(communication) / 1e3)
        assert row.exposed_comm_wait_us + row.exposed_comm_transfer_us == pytest.approx(
            (union_ns(compute + communication) - union_ns(compute)) / 1e3
        )
        assert row.exposed_copy_us == pytest.approx((union_ns(everything) - union_ns(compute + communication)) / 1e3)
        assert row.idle_unknown_us <= 0.02 * row.step_time_us
        assert not row.wait_is_bound  # both ranks are there


def test_its_33_exchanges_are_matched(database: sqlite3.Connection, summary: Summary) -> None:
    """Both processes leave each exchange within microseconds of each other, so the match is the right one."""
    rows = summary.collectives
    # The ranges around the launches describe the kernels; the first was launched before the recording began.
    assert [(row.kind, row.count, row.ranks) for row in rows] == [("all_to_all", 32, (0, 1)), ("send_recv", 1, (0, 1))]
    query = (
        "SELECT end FROM CUPTI_ACTIVITY_KIND_KERNEL JOIN StringIds ON StringIds.id = demangledName WHERE value LIKE "
        "'ncclDevKernel_SendRecv%' AND deviceId = ? ORDER BY start"
    )
    first, second = (np.array(database.execute(query, (device,)).fetchall()).ravel() for device in (0, 1))
    assert np.abs(first - second).max() < 100_000
    assert all(row.busbw_gbps is None for row in rows)  # sizes are not in the report


def test_what_is_missing_is_reported(summary: Summary) -> None:
    notes = {note.about: note.text for note in summary.notes}
    assert "numbered by process id" in notes["ranks"]
    assert "No steps were found" in notes["steps"]
    assert summary.utilisation.mfu is None
    assert summary.utilisation.why_absent
