"""What the reader makes of each dialect, on traces small enough to be checked by eye."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.readers import chrome, chrome_columns, chrome_scan
from perfscope.errors import TraceError
from perfscope.trace.trace import NONE, Category, Device, ProcessGroup, Thread
from tests.analyzers.readers.helpers import event, names, read

HEADER = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "NVIDIA A100", "totalGlobalMem": 42_000_000_000}],
    "cuda_runtime_version": 12040,
    "record_shapes": 1,
    "host_name": "node-7",
    "distributedInfo": {
        "backend": "nccl",
        "rank": 3,
        "world_size": 8,
        "pg_count": 2,
        "pg_config": [
            {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "pg_size": 8, "ranks": []},
            {"pg_name": "1", "pg_desc": "tp", "backend_config": "cuda:nccl", "pg_size": 2, "ranks": [2, 3]},
        ],
        "nccl_version": "2.22.3",
    },
    "displayTimeUnit": "ms",
}


def test_kernel_and_the_call_that_launched_it(tmp_path: Path) -> None:
    kernel = event(
        "gemm", cat="kernel", pid=0, tid=7, ts=12.345, dur=1.001,
        args={"External id": 5, "device": 0, "stream": 7, "correlation": 9, "grid": [1, 1, 1]},
    )  # fmt: skip
    launch = event("cudaLaunchKernel", cat="cuda_runtime", ts=10.5, dur=1, args={"External id": 5, "correlation": 9})
    trace = read(
        tmp_path, {**HEADER, "traceEvents": [kernel, launch], "baseTimeNanoseconds": 1_711_964_646_000_000_000}
    )

    assert names(trace) == ["cudaLaunchKernel", "gemm"]
    assert trace.category.tolist() == [Category.RUNTIME, Category.KERNEL]
    assert trace.start_ns.tolist() == [1_711_964_646_000_010_500, 1_711_964_646_000_012_345]
    assert trace.duration_ns.tolist() == [1000, 1001]
    assert trace.device.tolist() == [NONE, 0]
    assert trace.stream.tolist() == [NONE, 7]
    assert trace.correlation.tolist() == [9, 9]
    assert trace.external_id.tolist() == [5, 5]
    assert trace.threads == (Thread("0", "7", ""), Thread("10", "11", ""))


@pytest.mark.parametrize("place", ["before", "after"])
def test_metadata_before_or_after_the_events(tmp_path: Path, place: str) -> None:
    events = {"traceEvents": [event(ts=1)]}
    header = {**HEADER, "baseTimeNanoseconds": 1_000_000_000_000_000_000}
    trace = read(tmp_path, {**header, **events} if place == "before" else {**events, **header})

    assert trace.start_ns.tolist() == [1_000_000_000_000_001_000]
    assert (trace.rank, trace.world_size, trace.backend, trace.host) == (3, 8, "nccl", "node-7")
    assert trace.devices == (Device(0, "NVIDIA A100", 42_000_000_000),)
    assert trace.groups == (ProcessGroup("0", "default_pg", tuple(range(8))), ProcessGroup("1", "tp", (2, 3)))
    assert trace.versions == {"cuda_runtime": "12040", "nccl": "2.22.3"}
    assert trace.has_shapes


def test_metadata_on_both_sides_and_a_nested_key_of_the_same_name(tmp_path: Path) -> None:
    text = (
        '{"metadata": {"note": "\\"traceEvents\\": [", "copy": {"traceEvents": [1, {"ph": "X"}]}}, "record_shapes": 0,'
        ' "traceEvents" : [\n{"ph": "X", "name": "a", "ts": 1, "dur": 1, "args": {"Input Dims": [[2]]}}\n],'
        ' "INFO": ["x", {"a": 1}, {"ph": "X"}], "distributedInfo": {"rank": "2", "world_size": 4}}'
    )
    trace = read(tmp_path, text)

    assert names(trace) == ["a"]
    assert (trace.rank, trace.world_size) == (2, 4)
    assert not trace.has_shapes
    assert trace.parse_report.repaired_events == 0


@pytest.mark.parametrize("recorded", [{}, {"distributedInfo": {"backend": "nccl"}}, {"distributedInfo": None}])
def test_rank_that_is_not_recorded(tmp_path: Path, recorded: dict[str, Any]) -> None:
    trace = read(tmp_path, {**recorded, "traceEvents": [event()]})

    assert (trace.rank, trace.world_size) == (None, None)


def test_bare_array_with_byte_order_mark(tmp_path: Path) -> None:
    trace = read(tmp_path, b'\xef\xbb\xbf \n[{"ph":"X","name":"a","pid":1,"tid":2,"ts":3,"dur":4}]\n')

    assert (names(trace), trace.start_ns.tolist(), trace.duration_ns.tolist()) == (["a"], [3000], [4000])
    assert not trace.parse_report.truncated


@pytest.mark.parametrize(
    ("cat", "category"),
    [
        ("cpu_op", Category.CPU_OP),
        ("Operator", Category.CPU_OP),
        ("user_annotation", Category.ANNOTATION),
        ("python_function", Category.PYTHON),
        ("Kernel", Category.KERNEL),
        ("gpu_memcpy", Category.MEMCPY),
        ("Memcpy", Category.MEMCPY),
        ("gpu_memset", Category.MEMSET),
        ("Runtime", Category.RUNTIME),
        ("cuda_driver", Category.RUNTIME),
        ("hip_runtime", Category.RUNTIME),
        ("hip", Category.RUNTIME),
        ("xpu_runtime", Category.RUNTIME),
        ("mtia_runtime", Category.RUNTIME),
        ("mtia_ccp_events", Category.KERNEL),
        ("hpu_op", Category.RUNTIME),
        ("privateuse1_driver", Category.RUNTIME),
        ("cuda_sync", Category.SYNC),
        ("gpu_user_annotation", Category.GPU_ANNOTATION),
        ("Trace", Category.OTHER),
        ("overhead", Category.OTHER),
        ("something new", Category.OTHER),
    ],
)
def test_category(tmp_path: Path, cat: str, category: Category) -> None:
    assert read(tmp_path, [event(cat=cat)]).category.tolist() == [category]


def test_old_profilers_step_is_an_annotation(tmp_path: Path) -> None:
    trace = read(tmp_path, [event("ProfilerStep#3", cat="Operator"), event("aten::add", cat="Operator", ts=5)])

    assert trace.category.tolist() == [Category.ANNOTATION, Category.CPU_OP]


def test_operator_with_a_stream_is_no_device_work(tmp_path: Path) -> None:
    trace = read(tmp_path, [event("triton_poi_0", args={"stream": 7, "kernel_backend": "triton"})])

    assert (trace.category[0], trace.device[0], trace.stream[0]) == (Category.CPU_OP, NONE, NONE)


def test_device_and_stream_fall_back_on_the_track(tmp_path: Path) -> None:
    trace = read(tmp_path, [
        event("mark", cat="gpu_user_annotation", pid=1, tid=20, args={"External id": 1}),
        event("sync", cat="cuda_sync", pid=0, tid=-1, ts=2, args={"device": 0, "stream": -1}),
        event("old", cat="Kernel", pid="2", tid="stream 7", ts=3),
        event("quoted", cat="kernel", pid=0, tid=0, ts=4, args={"device": "3", "stream": "0x10", "correlation": "12"}),
    ])  # fmt: skip

    assert trace.device.tolist() == [1, 0, 2, 3]
    assert trace.stream.tolist() == [20, -1, 7, 16]
    assert trace.correlation.tolist() == [NONE, NONE, NONE, 12]


def test_ids_in_every_spelling(tmp_path: Path) -> None:
    ids = [7, "7", 7.0, None, 18446744073709551615, 18446744073709551614, "none", 10**30]
    trace = read(tmp_path, [event(ts=at, args={"External id": value}) for at, value in enumerate(ids)])

    assert trace.external_id.tolist()[:7] == [7, 7, 7, NONE, NONE, -2, NONE]
    assert len(trace) == 8
    assert trace.parse_report.repaired_events == trace.parse_report.dropped_events == 0


@pytest.mark.parametrize("digits", ["9" * 5000, '"' + "9" * 5000 + '"', '"stream ' + "9" * 5000 + '"'])
def test_numbers_of_thousands_of_digits_are_no_ids(tmp_path: Path, digits: str) -> None:
    args = (
        f'"stream": {digits}, "correlation": {digits}, "Collective name": "x", "Seq": {digits}, "Group size": {digits}'
    )
    trace = read(tmp_path, f'[{{"ph": "X", "cat": "kernel", "name": "a", "ts": 1, "dur": 1, "args": {{{args}}}}}]')

    assert (trace.stream[0], trace.correlation[0], trace.collectives.sequence[0]) == (NONE, NONE, NONE)


def test_old_spelling_of_external_id_and_none_for_python(tmp_path: Path) -> None:
    trace = read(tmp_path, [
        event("a", args={"external id": 4}),
        event("f.py(3): f", cat="python_function", ts=2, args={"External id": 9, "Python id": 1}),
    ])  # fmt: skip

    assert trace.external_id.tolist() == [4, NONE]


def test_shapes_types_and_inputs_once_each_without_white_space(tmp_path: Path) -> None:
    text = (
        '[{"ph":"X","cat":"cpu_op","name":"mm","ts":1,"dur":1,"args":{"Input Dims": [[2, 3], []], '
        '"Input type": ["float", "Scalar"], "Concrete Inputs": ["", "1"]}},'
        '{"ph":"X","cat":"cpu_op","name":"mm","ts":2,"dur":1,"args":{"Input Dims":[[2,3],[]]}},'
        '{"ph":"X","cat":"cpu_op","name":"mm","ts":3,"dur":1,"args":{"Input Dims":null}}]'
    )
    trace = read(tmp_path, text)

    assert trace.shapes[0] == trace.shapes[1] != NONE
    assert [trace.strings[column[0]] for column in (trace.shapes, trace.types, trace.inputs)] == [
        "[[2,3],[]]", '["float","Scalar"]', '["","1"]',
    ]  # fmt: skip
    assert (trace.types[1], trace.inputs[1], trace.shapes[2]) == (NONE, NONE, NONE)
    assert trace.has_shapes


COMMS = {
    "Collective name": "allreduce", "In msg nelems": 100, "Out msg nelems": 200, "Group size": 2, "dtype": "Float",
    "Process Group Name": "1", "Process Group Description": "tp", "Process Group Ranks": "[2, 3]", "Seq": 42,
}  # fmt: skip


def test_collective_arguments(tmp_path: Path) -> None:
    late = event("ncclDevKernel_AllReduce", cat="kernel", ts=9, args={**COMMS, "device": 0, "stream": 1})
    early = event("record_param_comms", ts=3, args={"Process Group Name": "5", "Process Group Ranks": [0, 3]})
    trace = read(tmp_path, [late, event("aten::add", ts=5), early])
    args = trace.collectives

    assert args.row.tolist() == [0, 2]
    assert [trace.strings[column[1]] for column in (args.kind, args.group, args.ranks, args.dtype)] == [
        "allreduce", "1", "[2, 3]", "Float",
    ]  # fmt: skip
    assert (args.kind[0], args.dtype[0], args.elements_in[0], args.sequence[0]) == (NONE, NONE, NONE, NONE)
    assert trace.strings[args.ranks[0]] == "[0,3]"
    assert [column[1] for column in (args.elements_in, args.elements_out, args.group_size, args.sequence)] == [
        100, 200, 2, 42,
    ]  # fmt: skip
    assert set(trace.groups) == {ProcessGroup("1", "tp", (2, 3)), ProcessGroup("5", "", (0, 3))}


def test_elided_ranks_come_from_the_groups_list(tmp_path: Path) -> None:
    elided = {**COMMS, "Process Group Ranks": "[0, 1, ..., 7]"}
    group = {"pg_name": "1", "pg_desc": "tp", "pg_size": 8, "ranks": list(range(8))}
    events = [event("a", args=elided), event("b", ts=2, args={**elided, "Process Group Name": "9"})]
    trace = read(tmp_path, {"distributedInfo": {"rank": 0, "pg_config": [group]}, "traceEvents": events})

    ranks = [trace.strings[index] for index in trace.collectives.ranks]
    assert ranks == ["[0, 1, 2, 3, 4, 5, 6, 7]", "[0, 1, ..., 7]"]
    assert trace.groups == (ProcessGroup("1", "tp", tuple(range(8))), ProcessGroup("9", "tp", ()))


def test_allocator_events(tmp_path: Path) -> None:
    def memory(ts: float, kind: int, device: int, total: int) -> dict[str, Any]:
        args = {"Total Allocated": total, "Total Reserved": 2 * total, "Device Type": kind, "Device Id": device}
        return {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "ts": ts, "args": args}

    other = {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 9}
    events = [event(), memory(7.5, 1, 0, 100), other, memory(2, 0, 0, 5)]
    for base in (0, 1000):
        trace = read(tmp_path, {"traceEvents": events, "baseTimeNanoseconds": base})
        assert trace.memory.time_ns.tolist() == [base + 2000, base + 7500]
        assert trace.memory.device.tolist() == [NONE, 0]
        assert trace.memory.allocated.tolist() == [5, 100]
        assert trace.memory.reserved.tolist() == [10, 200]
        assert len(trace) == 1


def test_threads_keep_every_name_they_had(tmp_path: Path) -> None:
    def label(name: Any, tid: Any = 11) -> dict[str, Any]:
        return {"ph": "M", "name": "thread_name", "pid": 10, "tid": tid, "ts": 0, "args": {"name": name}}

    flow = {"ph": "s", "id": 1, "pid": 10, "tid": 11, "ts": 1, "cat": "ac2g", "name": "ac2g"}
    trace = read(tmp_path, [flow, event(), label("main "), label("autograd"), label("main"), label(5, "Spans"),
                            event(pid="Spans", tid="PyTorch Profiler")])  # fmt: skip

    assert trace.threads == (Thread("10", "11", "main / autograd"), Thread("Spans", "PyTorch Profiler", ""))


def test_order_by_start_and_longer_first(tmp_path: Path) -> None:
    trace = read(
        tmp_path, [event("c", ts=5, dur=1), event("b", ts=2, dur=1), event("a", ts=2, dur=9), event("d", ts=5, dur=1)]
    )

    assert names(trace) == ["a", "b", "c", "d"]


def test_begin_and_end_make_a_range(tmp_path: Path) -> None:
    def half(phase: str, name: str, ts: float, tid: int = 11) -> dict[str, Any]:
        return {"ph": phase, "cat": "cpu_op", "name": name, "pid": 10, "tid": tid, "ts": ts, "args": {"External id": 3}}

    trace = read(tmp_path, [
        half("B", "outer", 1), half("B", "inner", 2.5), half("B", "other thread", 3, tid=12), half("E", "", 4),
        event("complete", ts=2, dur=1), half("E", "", 10), half("E", "", 5, tid=12), half("E", "of nothing", 20),
        half("B", "endless", 30),
    ])  # fmt: skip

    assert names(trace) == ["outer", "complete", "inner", "other thread"]
    assert trace.duration_ns.tolist() == [9000, 1000, 1500, 2000]
    assert trace.external_id.tolist() == [3, NONE, 3, 3]
    assert trace.parse_report.dropped_events == 2
    assert trace.parse_report.notes == ("1 ranges never end, 1 ends have no beginning",)


def test_asynchronous_ranges_are_reported_as_not_read(tmp_path: Path) -> None:
    trace = read(tmp_path, [event(), {"ph": "b", "id": 1, "ts": 1}, {"ph": "e", "id": 1, "ts": 2}, {"ph": "Z"}, {}])

    assert trace.parse_report.notes == (
        "events of kinds that are not read: 1 of phase 'Z', 1 of phase 'b', 1 of phase 'e'",
    )
    assert trace.parse_report.dropped_events == 0


@pytest.mark.parametrize(
    ("base", "ts", "start_ns"),
    [
        ("1751410836000000000", "1428625731896.179", 1_752_839_461_731_896_179),
        ("0", "1661203462598738", 1_661_203_462_598_738_000),
        ("0", "1661203462598738.123", 1_661_203_462_598_738_123),
        ("0", '"1661203462598738.123"', 1_661_203_462_598_738_123),
        ("0", "1661203462598738.0", 1_661_203_462_598_738_000),
        ("0", "1.661203462598738123e15", 1_661_203_462_598_738_123),
        ("0", "8796093022208.001", 8_796_093_022_208_001),
        ("0", "8796093022207.999", 8_796_093_022_207_999),
        ("0", "2199023255552.0005", 2_199_023_255_552_000),
        ("0", "2199023255552.0015", 2_199_023_255_552_002),
        ("0", "-3.5", -3500),
        ("1000", "-0.5", 500),
        ('"1000"', "0.5", 1500),
    ],
)
def test_times_are_exact(tmp_path: Path, base: str, ts: str, start_ns: int) -> None:
    text = f'{{"baseTimeNanoseconds": {base}, "traceEvents": [{{"ph": "X", "name": "a", "ts": {ts}, "dur": 0.001}}]}}'
    trace = read(tmp_path, text)

    assert (trace.start_ns.tolist(), trace.duration_ns.tolist()) == ([start_ns], [1])


def test_events_whose_times_cannot_be_are_dropped_and_counted(tmp_path: Path) -> None:
    impossible = [
        event("no start", ts=None), event("text", ts="soon"), event("backwards", dur=-1), event("beyond", ts=10**17),
        event("endless", dur=9.2e15, ts=9e14), event("true", ts=True),
    ]  # fmt: skip
    trace = read(tmp_path, {"baseTimeNanoseconds": 10**18, "traceEvents": [event("good"), *impossible]})

    assert names(trace) == ["good"]
    assert trace.parse_report.dropped_events == len(impossible)


def test_missing_fields_have_no_meaning(tmp_path: Path) -> None:
    trace = read(
        tmp_path, [{"ph": "X", "ts": 1}, {"ph": "X", "ts": 2, "name": None, "cat": 5, "args": [1], "dur": "3"}]
    )

    assert names(trace) == ["", ""]
    assert trace.duration_ns.tolist() == [0, 3000]
    assert trace.category.tolist() == [Category.OTHER] * 2
    assert trace.parse_report.dropped_events == 0


@pytest.mark.parametrize(
    "content",
    ["", "   ", "not a trace", "{}", '{"traceEvents": []}', "[]", '{"a": 1, "b": [1, 2]}', "5", '{"traceEvents": [',
     '{"schemaVersion": 1, "deviceProp', '[{"ph": "M", "name": "thread_name"}]', "[1, 2]", b"\x00\x01\x02"],
)  # fmt: skip
def test_file_without_events_is_an_error_that_names_it(tmp_path: Path, content: str | bytes) -> None:
    with pytest.raises(TraceError, match=r"trace\.json: .*record it again"):
        read(tmp_path, content)


def test_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"absent\.json: cannot be read"):
        chrome.read(tmp_path / "absent.json")


@pytest.mark.parametrize("compiled", [True, False])
def test_nothing_but_the_trace_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    if compiled and not chrome_scan.IS_BUILT:
        pytest.skip("the scanner is not built")
    made: list[weakref.ref[Any]] = []

    class Seen(chrome_columns.Numbering[Any]):
        def __init__(self, make: Any) -> None:
            super().__init__(make)
            made.append(weakref.ref(self))

    monkeypatch.setattr(chrome_columns, "Numbering", Seen)
    path = tmp_path / "trace.json"
    args = {"Input Dims": [[2, 3]], "Input type": ["float"]}
    path.write_text(json.dumps({**HEADER, "traceEvents": [event("aten::mm", args=args), event("aten::add", ts=9)]}))
    gc.disable()
    try:
        assert len(chrome.read(path, compiled=compiled)) == 2
        assert made
        assert [numbering for numbering in made if numbering() is not None] == []
    finally:
        gc.enable()
