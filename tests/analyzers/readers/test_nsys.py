"""Small hand-made exports of every generation, with answers known by eye."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from perfscope.analyzers.readers import detect, nsys, parts, read
from perfscope.errors import TraceError
from perfscope.trace.trace import NONE, Category, Trace
from tests.analyzers.readers.nsys_exports import EPOCH_NS, GENERATIONS, Export, Generation, process_id

MAIN, SIDE = 144, 150
"""Threads."""
PID = 144


def write(path: Path, generation: Generation = "2026", pid: int = PID) -> Export:
    """One process, one step: an operator launches a kernel, copies its result and waits for it."""
    export = Export(path, generation)
    export.process(pid, "python3")
    export.nvtx(pid, MAIN, "perfscope::step#3", 100, 900)
    export.nvtx(pid, MAIN, "aten::mm, seq = 12, op_id = 7, sizes = [[2, 3], [3, 4]]", 110, 300)
    export.nvtx(pid, MAIN, "perfscope::dataloader", 310, 400, registered=True)
    export.nvtx(pid, MAIN, "whole", 90, 950, kind=60, registered=True)
    export.call(pid, MAIN, "cudaLaunchKernel_v7000", 120, 130, 1)
    export.call(pid, MAIN, "cudaMemcpyAsync_ptsz_v7000", 410, 420, 2)
    export.call(pid, MAIN, "cudaStreamSynchronize_v3020", 430, 800, 3)
    export.kernel(pid, "void gemm<(int)128>(float *)", 140, 600, (1, 7), 1)
    export.copy(pid, 610, 700, (2, 2, 1), (1, 7), 2)
    export.fill(pid, 20, 30, (1, 7), 99)
    export.sync(pid, 3, 432, 798, 7)
    export.sync(pid, 1, 500, 501, (1 << 32) - 1)
    export.os_call(pid, MAIN, "poll", 320, 390)
    export.os_call(pid, SIDE, "pthread_cond_wait", 0, 10_000)
    return export


def rows(trace: Trace) -> list[tuple[str, str, int, int]]:
    """(category, name, start and end on the session's clock) of each event, in order."""
    return [
        (
            Category(int(trace.category[row])).name,
            trace.name_of(row),
            int(trace.start_ns[row]) - EPOCH_NS,
            int(trace.end_ns[row]) - EPOCH_NS,
        )
        for row in range(len(trace))
    ]


EXPECTED = [
    ("MEMSET", "Memset (Device)", 20, 30),
    ("ANNOTATION", "whole", 90, 950),
    ("ANNOTATION", "perfscope::step#3", 100, 900),
    ("CPU_OP", "aten::mm", 110, 300),
    ("RUNTIME", "cudaLaunchKernel", 120, 130),
    ("KERNEL", "void gemm<(int)128>(float *)", 140, 600),
    ("ANNOTATION", "perfscope::dataloader", 310, 400),
    ("OTHER", "poll", 320, 390),
    ("RUNTIME", "cudaMemcpyAsync", 410, 420),
    ("RUNTIME", "cudaStreamSynchronize", 430, 800),
    ("SYNC", "Stream Sync", 432, 798),
    ("SYNC", "Event Sync", 500, 501),
    ("MEMCPY", "Memcpy DtoH (Device -> Pinned)", 610, 700),
]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_what_a_process_did(tmp_path: Path, generation: Generation) -> None:
    path = write(tmp_path / "report.sqlite", generation).close()
    trace = nsys.read(path)
    trace.self_check()
    assert rows(trace) == EXPECTED
    (kernel,) = trace.rows(Category.KERNEL)
    (operator,) = trace.rows(Category.CPU_OP)
    launch = trace.rows(Category.RUNTIME)[0]
    assert (trace.device[kernel], trace.stream[kernel]) == (1, 7)
    assert trace.correlation[kernel] == trace.correlation[launch] == 1
    assert trace.strings[trace.shapes[operator]] == "[[2,3],[3,4]]"
    assert trace.has_shapes
    assert trace.threads[trace.thread[operator]].tid == str(MAIN)
    assert trace.stream[trace.rows(Category.SYNC)].tolist() == [7, NONE]
    assert trace.versions["nsys"].startswith(generation)
    assert trace.parse_report.notes == ()


def test_a_report_is_one_part_for_each_process(tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    export = write(path)
    export.process(145, "python3")
    # The same correlation ids as in the first process, for other work.
    export.call(145, MAIN, "cudaLaunchKernel_v7000", 200, 210, 1)
    export.kernel(145, "other", 220, 260, (0, 7), 1)
    export.nvtx(PID, MAIN, "perfscope::rank#1 of 2", 1, None, kind=34)
    export.nvtx(145, MAIN, "perfscope::rank#0 of 2", 1, None, kind=34, registered=True)
    export.close()

    first, second = nsys.ranks(path)
    assert (first.pid, first.rank, first.world_size, first.rank_source) == (144, 1, 2, "NVTX")
    assert (second.pid, second.rank, second.world_size, second.name) == (145, 0, 2, "python3")
    assert parts(path) == (first.part, second.part)
    assert rows(read(path, first.part)) == EXPECTED
    trace = read(path, second.part)
    assert rows(trace) == [("RUNTIME", "cudaLaunchKernel", 200, 210), ("KERNEL", "other", 220, 260)]
    assert (trace.rank, trace.world_size, trace.source) == (0, 2, f"{path} (process 145)")
    with pytest.raises(TraceError, match=r"report\.sqlite: has 2 processes; name one of them: .*process 144"):
        read(path)


class TestWhoseReportItIs:
    """Ranks come from what was recorded, or are unknown."""

    def ranks(self, export: Export) -> list[tuple[int | None, int | None, str]]:
        return [(found.rank, found.world_size, found.rank_source) for found in nsys.ranks(export.close())]

    def test_it_is_not_recorded(self, tmp_path: Path) -> None:
        assert self.ranks(write(tmp_path / "a.sqlite")) == [(None, None, "")]

    def test_the_environment_of_the_only_process(self, tmp_path: Path) -> None:
        export = write(tmp_path / "a.sqlite", "2022")
        export.machine("DeviceEnvironment", "PATH=/bin;SLURM_PROCID=4;RANK=3;WORLD_SIZE=8;RANKS=7")
        assert self.ranks(export) == [(3, 8, "RANK")]

    def test_the_environment_as_newer_reports_record_it(self, tmp_path: Path) -> None:
        export = write(tmp_path / "a.sqlite")
        for variable in ('OMPI_COMM_WORLD_RANK="5"', 'OMPI_COMM_WORLD_SIZE="6"', 'RANK=""'):
            export.put("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value=variable)
        assert self.ranks(export) == [(5, 6, "OMPI_COMM_WORLD_RANK")]

    def test_the_environment_does_not_hold_for_one_process_among_several(self, tmp_path: Path) -> None:
        export = write(tmp_path / "a.sqlite")
        write_second(export)
        export.machine("DeviceEnvironment", "RANK=0;WORLD_SIZE=1")
        assert self.ranks(export) == [(None, None, ""), (None, None, "")]

    def test_mpi(self, tmp_path: Path) -> None:
        export = write(tmp_path / "a.sqlite")
        write_second(export)
        for pid, rank in ((PID, 1), (145, 0)):
            export.put("MPI_RANKS", globalTid=process_id(pid) | MAIN, rank=rank)
        assert self.ranks(export) == [(1, 2, "MPI"), (0, 2, "MPI")]

    @pytest.mark.parametrize(
        ("arguments", "world"),
        [
            (["--nnodes=2", "--nproc_per_node=4", "train.py"], 8),
            (["--nproc-per-node", "4", "train.py", "--nnodes=7"], 4),
            (["--nnodes=1:4", "--nproc_per_node=4", "train.py"], None),
            (["--nproc_per_node=gpu", "train.py"], None),
        ],
    )
    def test_torchrun_s_arguments_say_how_many_there_are(
        self, tmp_path: Path, arguments: list[str], world: int | None
    ) -> None:
        export = write(tmp_path / "a.sqlite")
        export.put("META_DATA_CAPTURE", name="PROCESS_0:COMMAND", value="/opt/bin/torchrun")
        for index, argument in enumerate(arguments):
            export.put("META_DATA_CAPTURE", name=f"PROCESS_0:ARGUMENT_{index}", value=argument)
        assert self.ranks(export) == [(None, world, "")]

    def test_processes_without_device_work_are_no_ranks_beside_those_with(self, tmp_path: Path) -> None:
        export = write(tmp_path / "a.sqlite")
        export.nvtx(999, 999, "loading", 1, 2)
        export.copy(998, 1, 2, (1, 1, 2))
        assert len(self.ranks(export)) == 1

    def test_without_any_device_those_with_ranges_are(self, tmp_path: Path) -> None:
        export = Export(tmp_path / "a.sqlite")
        export.nvtx(10, 10, "step", 1, 20)
        export.nvtx(11, 11, "step", 1, 20)
        export.nvtx(12, 12, "no range but a mark", 1, None, kind=34)
        assert len(self.ranks(export)) == 2

    def test_and_those_that_say_a_rank_before_all_others(self, tmp_path: Path) -> None:
        export = Export(tmp_path / "a.sqlite")
        export.nvtx(10, 10, "launching", 1, 20)
        export.nvtx(11, 11, "step", 1, 20)
        export.nvtx(11, 11, "perfscope::rank#0", 1, None, kind=34)
        assert self.ranks(export) == [(0, None, "NVTX")]


def write_second(export: Export) -> None:
    export.kernel(145, "other", 220, 260, (0, 7), 1)


class TestNames:
    @pytest.mark.parametrize(
        ("text", "category", "name", "shapes"),
        [
            ("aten::mm", "CPU_OP", "aten::mm", ""),
            ("aten::add, op_id = 5", "CPU_OP", "aten::add", ""),
            ("MulBackward0, seq = 4, op_id = 5", "CPU_OP", "MulBackward0", ""),
            ("flash_attn::_flash_attn_forward, op_id = 1", "CPU_OP", "flash_attn::_flash_attn_forward", ""),
            ("record_param_comms, op_id = 1", "CPU_OP", "record_param_comms", ""),
            ("autograd::engine::evaluate_function: MulBackward0, op_id = 1", "CPU_OP",
             "autograd::engine::evaluate_function: MulBackward0", ""),
            ("aten::cat, seq = 0, op_id = 2, sizes = [[], [4]], input_op_ids = [(1, 0)]", "CPU_OP", "aten::cat",
             "[[],[4]]"),
            ("aten::cat, op_id = 2, sizes = [[8, 1024], [10", "CPU_OP", "aten::cat", ""),
            ("FSDP::pre_forward (blocks.9), op_id = 3", "ANNOTATION", "FSDP::pre_forward (blocks.9)", ""),
            ("my step, op_id = 3", "ANNOTATION", "my step", ""),
            ("nccl:all_to_all", "ANNOTATION", "nccl:all_to_all", ""),
            ("perfscope::forward", "ANNOTATION", "perfscope::forward", ""),
            ("a, b", "ANNOTATION", "a, b", ""),
            ("", "ANNOTATION", "", ""),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("registered", [False, True])
    def test_of_ranges(
        self, tmp_path: Path, text: str, category: str, name: str, shapes: str, *, registered: bool
    ) -> None:
        export = Export(tmp_path / "a.sqlite")
        export.nvtx(1, 1, text, 5, 6, registered=registered)
        trace = nsys.read(export.close())
        assert rows(trace) == [(category, name, 5, 6)]
        assert (trace.strings[trace.shapes[0]] if trace.shapes[0] != NONE else "") == shapes

    def test_that_the_export_does_not_explain(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.sqlite").close()
        with sqlite3.connect(path) as database:
            database.execute("DELETE FROM StringIds WHERE value LIKE '%gemm%'")
        database.close()
        trace = nsys.read(path)
        assert trace.name_of(int(trace.rows(Category.KERNEL)[0])).startswith("[name ")
        assert trace.parse_report.notes == ("1 names are not in the report; events with them are called [name N]",)

    def test_of_copies_without_memory_kinds(self, tmp_path: Path) -> None:
        export = Export(tmp_path / "a.sqlite")
        export.copy(1, 1, 2, (8, 99, 99))
        assert rows(nsys.read(export.close())) == [("MEMCPY", "Memcpy DtoD", 1, 2)]


class TestGraphs:
    def test_a_graph_recorded_whole_is_one_piece_of_work_and_reported(self, tmp_path: Path) -> None:
        export = Export(tmp_path / "a.sqlite")
        export.call(1, 1, "cudaGraphLaunch_v10000", 1, 3, 77)
        export.graph(1, 5, 10, 90, 77)
        trace = nsys.read(export.close())
        assert rows(trace) == [("RUNTIME", "cudaGraphLaunch", 1, 3), ("KERNEL", "CUDA graph 5", 10, 90)]
        assert trace.correlation.tolist() == [77, 77]
        assert "--cuda-graph-trace=node" in trace.parse_report.notes[0]

    def test_nodes_go_before_the_whole(self, tmp_path: Path) -> None:
        export = Export(tmp_path / "a.sqlite")
        export.graph(1, 5, 10, 90, 77)
        export.kernel(1, "node", 10, 40, correlation=77)
        export.kernel(1, "node", 50, 90, correlation=77)
        trace = nsys.read(export.close())
        assert rows(trace) == [("KERNEL", "node", 10, 40), ("KERNEL", "node", 50, 90)]
        assert trace.parse_report.notes == ()


class TestWhatIsNotThere:
    def test_kernels_alone(self, tmp_path: Path) -> None:
        export = Export(tmp_path / "a.sqlite")
        export.kernel(1, "k", 10, 40)
        assert rows(nsys.read(export.close())) == [("KERNEL", "k", 10, 40)]

    def test_columns_of_another_time(self, tmp_path: Path) -> None:
        path = tmp_path / "a.sqlite"
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
            database.execute("INSERT INTO StringIds VALUES (7, 'k')")
            database.execute(
                "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, shortName, globalPid, aColumnOf2031 BLOB)"
            )
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (10, 40, 7, ?, x'00')", (process_id(1),))
        database.close()
        trace = nsys.read(path)
        assert [trace.name_of(0), int(trace.start_ns[0]), int(trace.correlation[0])] == ["k", 10, NONE]
        assert "clock cannot be aligned" in trace.parse_report.notes[0]

    def test_times_exported_since_the_epoch_are_left_alone(self, tmp_path: Path) -> None:
        export = Export(tmp_path / "a.sqlite")
        export.kernel(1, "k", EPOCH_NS + 10, EPOCH_NS + 40)
        assert rows(nsys.read(export.close())) == [("KERNEL", "k", 10, 40)]

    def test_ranges_that_never_end_are_counted(self, tmp_path: Path) -> None:
        export = write(tmp_path / "a.sqlite")
        export.nvtx(PID, MAIN, "perfscope::step#4", 900, None)
        trace = nsys.read(export.close())
        assert rows(trace) == EXPECTED
        assert trace.parse_report.dropped_events == 1
        assert trace.parse_report.notes == ("1 NVTX ranges never end: the recording stopped inside them",)

    @pytest.mark.parametrize("epoch_ns", [2**63 - 1, -(2**63)])
    def test_a_start_of_the_session_that_cannot_be_is_not_known(self, tmp_path: Path, epoch_ns: int) -> None:
        path = write(tmp_path / "a.sqlite").close()
        with sqlite3.connect(path) as database:
            database.execute("UPDATE TARGET_INFO_SESSION_START_TIME SET utcEpochNs = ?", (epoch_ns,))
        database.close()
        trace = nsys.read(path)
        assert 0 <= int(trace.start_ns[0]) <= int(trace.end_ns.max()) < 10**9
        assert "clock cannot be aligned" in trace.parse_report.notes[0]

    def test_a_row_years_from_all_others_is_dropped_and_counted(self, tmp_path: Path) -> None:
        export = write(tmp_path / "a.sqlite")
        years_ns = 10 * 365 * 86_400 * 10**9
        export.kernel(PID, "k", years_ns, years_ns + 40)
        trace = nsys.read(export.close())
        assert rows(trace) == EXPECTED
        assert trace.parse_report.dropped_events == 1

    def test_one_process_on_two_devices_is_reported(self, tmp_path: Path) -> None:
        export = write(tmp_path / "a.sqlite")
        export.kernel(PID, "k", 10, 40, (0, 7))
        assert nsys.read(export.close()).parse_report.notes == (
            "one process uses devices 0, 1: their work is analyzed as that of one device",
        )

    def test_nothing_to_analyze(self, tmp_path: Path) -> None:
        path = Export(tmp_path / "a.sqlite").close()
        with pytest.raises(TraceError, match=r"a\.sqlite: has no kernel.*nsys profile -t cuda,nvtx,osrt"):
            nsys.ranks(path)


def test_events_of_2026_say_when_they_were_reached(tmp_path: Path) -> None:
    export = write(tmp_path / "a.sqlite")
    for time in (650, 0):
        export.put(
            "CUPTI_ACTIVITY_KIND_CUDA_EVENT", timestamp=time, deviceId=1, contextId=1, streamId=7, correlationId=5,
            globalPid=process_id(PID), eventId=1,
        )  # fmt: skip
    trace = nsys.read(export.close())
    assert ("SYNC", "Event Record", 650, 650) in rows(trace)
    assert len(trace) == len(EXPECTED) + 1


class TestDamage:
    @pytest.mark.parametrize("lost", [1, 2000, 4096, 5000, 30_000])
    def test_a_file_cut_short(self, tmp_path: Path, lost: int) -> None:
        path = write(tmp_path / "a.sqlite").close()
        path.write_bytes(path.read_bytes()[:-lost])
        with pytest.raises(TraceError, match=r"a\.sqlite: is (damaged|cut short).*export the report again"):
            nsys.read(path)

    def test_a_page_overwritten(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.sqlite").close()
        data = bytearray(path.read_bytes())
        data[4096:] = b"\xff" * (len(data) - 4096)
        path.write_bytes(bytes(data))
        with pytest.raises(TraceError, match=r"a\.sqlite: is damaged"):
            nsys.read(path)

    def test_any_bytes_overwritten_cost_no_more_than_the_file(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.sqlite").close()
        whole, chance = path.read_bytes(), random.Random(20)
        errors: list[str] = []
        for _ in range(300):
            data = bytearray(whole)
            for _ in range(chance.choice((1, 5, 50))):
                data[chance.randrange(len(data))] = chance.randrange(256)
            path.write_bytes(data)
            try:
                for found in nsys.ranks(path):
                    nsys.read(path, found.part).self_check()
            except TraceError as error:
                errors.append(str(error))
        assert 0 < len(errors) < 300
        assert all("a.sqlite" in error for error in errors)

    def test_text_that_is_no_utf8(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.sqlite").close()
        with sqlite3.connect(path) as database:
            database.execute("UPDATE StringIds SET value = CAST(x'ff6b' AS TEXT) WHERE value LIKE '%gemm%'")
        database.close()
        assert nsys.read(path).strings.count("�k") == 1

    def test_a_folder_that_cannot_be_written_is_read_all_the_same(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.sqlite").close()
        tmp_path.chmod(0o500)
        try:
            assert rows(nsys.read(path)) == EXPECTED
        finally:
            tmp_path.chmod(0o700)
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.sqlite"]


class TestParquet:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """The same report, exported as a folder with a Parquet file a table."""
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        path = write(tmp_path / "report.sqlite").close()
        folder = tmp_path / "report_pqtdir"
        folder.mkdir()
        with sqlite3.connect(path) as database:
            for (table,) in database.execute("SELECT name FROM sqlite_master").fetchall():
                cursor = database.execute(f"SELECT * FROM {table}")
                names = [column[0] for column in cursor.description]
                columns = zip(*cursor.fetchall(), strict=True)
                content = arrow.table({name: list(column) for name, column in zip(names, columns, strict=True)})
                parquet.write_table(content, folder / f"{table}.parquet")
        database.close()
        path.unlink()
        return folder

    def test_reads_as_its_sqlite_twin(self, folder: Path) -> None:
        assert detect(folder) == "nsys-parquet"
        (part,) = parts(folder)
        trace = read(folder, part)
        trace.self_check()
        assert rows(trace) == EXPECTED

    def test_a_damaged_table_is_named(self, folder: Path) -> None:
        (folder / "CUPTI_ACTIVITY_KIND_MEMCPY.parquet").write_bytes(b"PAR1 and no more")
        with pytest.raises(TraceError, match=r"CUPTI_ACTIVITY_KIND_MEMCPY\.parquet: is damaged"):
            nsys.read(folder)

    def test_without_pyarrow_the_remedy_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "StringIds.parquet").write_bytes(b"")
        monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
        with pytest.raises(TraceError, match="pip install pyarrow, or export with nsys export --type sqlite"):
            nsys.ranks(tmp_path)
