"""A run recorded by a real ``nsys``, where there is one: found through ``PERFSCOPE_NSYS`` or the path.

NVTX ranges and the operating system's calls are recorded without a device. Releases of ``nvtx`` above 0.2.10 leave no
range in reports of Nsight Systems before 2024; ``PERFSCOPE_TEST_NVTX`` names a folder with another release in it.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import perfscope
from perfscope.analyzers.readers import nsys, nsys_export
from perfscope.execution.serial import Serial
from perfscope.trace.trace import Category, Trace

SCRIPT = Path(__file__).parent / "scripts" / "nvtx_job.py"
RANKS, STEPS = 2, 3
ATTEMPTS, ATTEMPT_S = 3, 150


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two processes, beside what they measured of themselves."""
    program = nsys_export.find_nsys()
    if program is None:
        pytest.skip("no nsys: neither PERFSCOPE_NSYS nor the path names one")
    folder = tmp_path_factory.mktemp("recorded")
    command = [
        program, "profile", "--trace", "nvtx,osrt", "--sample", "none", "--cpuctxsw", "none",
        "--force-overwrite", "true", "--output", str(folder / "report"), sys.executable, str(SCRIPT), str(folder),
    ]  # fmt: skip
    extra = os.environ.get("PERFSCOPE_TEST_NVTX")
    environment = {**os.environ, "RANK": "7"}  # of the launcher, and so of neither process
    if extra:
        environment["PYTHONPATH"] = extra
    said = ""
    for _ in range(ATTEMPTS):
        returned, said = profiled(command, environment, folder)
        if returned == 0 and "Local Endpoint is not available" not in said:
            return folder / "report.nsys-rep"
        if "Traceback" in said:
            pytest.fail(said)
    pytest.skip(f"nsys did not record in {ATTEMPTS} attempts: {said.strip() or 'it did not end'}")


def profiled(command: list[str], environment: dict[str, str], folder: Path) -> tuple[int, str]:
    """Exit code and output of ``nsys``.

    Where its agent begins too late, ``nsys`` waits for ever or ends with "End of file". After either, the processes it
    started are killed, for the next attempt to find none of them.
    """
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command, env={**environment, "PERFSCOPE_TEST_MARK": mark}, cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=ATTEMPT_S)
    except subprocess.TimeoutExpired:
        kill_marked(mark)
        said, _ = process.communicate()
    if process.returncode != 0:
        kill_marked(mark)
    return process.returncode, said


def kill_marked(mark: str) -> None:
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.environ().get("PERFSCOPE_TEST_MARK") == mark:
                each.kill()


@pytest.fixture(scope="module")
def export(report: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``nsys`` itself exports."""
    program = nsys_export.find_nsys()
    assert program is not None
    path = tmp_path_factory.mktemp("exported") / "report.sqlite"
    command = [program, "export", "--type", "sqlite", "--output", str(path), str(report)]
    subprocess.run(command, capture_output=True, check=True)
    with sqlite3.connect(path) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        ranges = "SELECT count(*) FROM NVTX_EVENTS WHERE eventType = 59" if "NVTX_EVENTS" in tables else "SELECT 0"
        (count,) = database.execute(ranges).fetchone()
    database.close()
    if not count:
        pytest.skip(
            "this nvtx leaves no range in reports of this nsys: put 0.2.10 into a folder for PERFSCOPE_TEST_NVTX"
        )
    return path


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFSCOPE_CACHE", str(tmp_path))


def read(path: Path) -> dict[int | None, Trace]:
    return {found.rank: nsys.read(path, found.part) for found in nsys.ranks(path)}


def test_every_process_has_the_rank_of_its_mark(export: Path) -> None:
    traces = read(export)
    assert sorted(rank for rank in traces if rank is not None) == list(range(RANKS)) == sorted(traces)
    for trace in traces.values():
        trace.self_check()
        assert trace.world_size == RANKS
        names = [trace.name_of(int(row)) for row in trace.rows(Category.ANNOTATION)]
        assert names.count("perfscope::dataloader") == STEPS
        assert names.count("training") == 1
        (shapes,) = {trace.strings[trace.shapes[row]] for row in trace.rows(Category.CPU_OP)}
        assert shapes == "[[2,3],[3,4]]"
        assert len(trace.rows(Category.OTHER)) > 0


def test_times_are_the_machine_s_own(report: Path, export: Path) -> None:
    """The step ranges lie where the processes measured them, by the same clock that the wall shows."""
    for rank, trace in read(export).items():
        measured = json.loads((report.parent / f"rank{rank}.json").read_text())
        for step, (began, ended) in enumerate(measured):
            (row,) = [row for row in trace.rows(Category.ANNOTATION) if trace.name_of(row) == f"perfscope::step#{step}"]
            # A wrong epoch or unit is off by far more than a process that the machine kept waiting.
            assert began - 100_000_000 < trace.start_ns[row] < trace.end_ns[row] < ended + 100_000_000
            assert trace.duration_ns[row] == pytest.approx(ended - began, abs=50_000_000)


def test_its_time_breakdown(export: Path) -> None:
    summary = perfscope.analyze(export, executor=Serial())
    summary.self_check()
    assert summary.job.ranks == tuple(range(RANKS))
    assert summary.job.steps == tuple(range(STEPS))
    for row in summary.time_breakdown:
        # Sleeps and waits may be longer than asked for on a busy machine, never shorter.
        assert row.idle_dataloader_us >= 10_000 * (row.rank + 1)
        assert row.compute_us >= 15_000


@pytest.mark.usefixtures("own_cache")
def test_a_report_reads_as_its_export_does(report: Path, export: Path) -> None:
    ours, theirs = read(report), read(export)
    assert ours.keys() == theirs.keys()
    for rank, trace in ours.items():
        assert trace.start_ns.tolist() == theirs[rank].start_ns.tolist()
        assert trace.strings == theirs[rank].strings
        assert str(report) in trace.source


def test_a_parquet_export_reads_as_the_sqlite_one_does(report: Path, export: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.parquet")
    program = nsys_export.find_nsys()
    assert program is not None
    folder = tmp_path / "report_pqtdir"
    command = [program, "export", "--type", "parquetdir", "--output", str(folder), str(report)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this nsys is too old for Parquet exports")
    ours, theirs = read(folder), read(export)
    assert ours.keys() == theirs.keys()
    for rank, trace in ours.items():
        assert trace.start_ns.tolist() == theirs[rank].start_ns.tolist()
        assert [trace.strings[name] for name in trace.name] == [
            theirs[rank].strings[name] for name in theirs[rank].name
        ]
