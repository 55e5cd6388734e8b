"""Writers whose process and thread names define what an event is: TensorFlow, JAX, Horovod; and ranks in one file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import perfscope
from perfscope.analyzers.readers import chrome, chrome_scan
from perfscope.errors import TraceError
from perfscope.execution.serial import Serial
from perfscope.trace.trace import NONE, Category
from tests.analyzers.readers.helpers import event, names, read, save


def label(what: str, name: str, pid: int, tid: int | None = None) -> dict[str, Any]:
    track = {"pid": pid} if tid is None else {"pid": pid, "tid": tid}
    return {"ph": "M", "name": f"{what}_name", **track, "args": {"name": name}}


def span(name: str, pid: int, tid: int, ts: float, dur: float = 1) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur, "name": name, "args": {"long_name": name}}


JAX_ON_GPU = {
    "displayTimeUnit": "ns",
    "metadata": {"highres-ticks": True},
    "traceEvents": [
        label("process", "/device:GPU:1", 4),
        {"ph": "M", "name": "process_sort_index", "pid": 4, "args": {"sort_index": 4}},
        label("thread", "Stream #13(Compute,MemcpyD2D)", 4, 13),
        label("thread", "Steps", 4, 20),
        label("thread", "XLA Ops", 4, 22),
        label("process", "/host:CPU", 701),
        label("thread", "python", 701, 5),
        span("fusion_7", 4, 13, 10, 4),
        span("MemcpyD2D", 4, 13, 15),
        span("Memset 0", 4, 13, 17),
        span("12", 4, 20, 10, 8),
        span("fusion", 4, 22, 10, 4),
        span("PjitFunction(step)", 701, 5, 1, 5),
        span("cuLaunchKernel", 701, 5, 2),
        span("$train.py:12 main", 701, 5, 0, 20),
        span("$<unknown> __exit__", 701, 5, 21),
        {**span("train", 701, 5, 0.5, 19), "args": {"group_id": "1", "step_num": "12"}},
        {},
    ],
}


def by_name(content: Any, tmp_path: Path) -> dict[str, Category]:
    trace = read(tmp_path, content)
    return {trace.name_of(row): Category(trace.category[row]) for row in range(len(trace))}


WITHOUT_CATEGORIES = [
    label("process", "GPU 3", 8),
    label("thread", "stream 9", 5, 90),
    span("ProfilerStep#4", 1, 1, 0, 50),
    span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 1, 1, 1),
    span("aten::mm", 1, 1, 3, 3),
    {**span("cudaLaunchKernel", 1, 1, 4), "args": {"correlation": 12, "stream": 7}},
    {**span("gemm", 1, 2, 5, 4), "args": {"device": 3, "stream": 7, "correlation": 12}},
    span("softmax", 8, 7, 10),
    span("Memcpy HtoD (Pinned -> Device)", 8, 21, 12),
    span("Memset (Device)", 5, 90, 14),
    span("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 3, 20, 16),
    span("forward", 1, 1, 2, 20),
    {**span("gemv", 8, 7, 18), "cat": "of another tool"},
]


@pytest.mark.parametrize("compiled", [True, False])
def test_events_without_a_category_are_known_by_name_stream_and_process(compiled: bool, tmp_path: Path) -> None:
    path = save(tmp_path, WITHOUT_CATEGORIES)
    trace = chrome.read(path, compiled=compiled and chrome_scan.IS_BUILT)
    found = {
        trace.name_of(row): (Category(trace.category[row]).name, int(trace.device[row]), int(trace.stream[row]))
        for row in range(len(trace))
    }
    assert found == {
        "ProfilerStep#4": ("ANNOTATION", NONE, NONE),
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__": ("ANNOTATION", NONE, NONE),
        "aten::mm": ("CPU_OP", NONE, NONE),
        "cudaLaunchKernel": ("RUNTIME", NONE, NONE),
        "gemm": ("KERNEL", 3, 7),
        "softmax": ("KERNEL", 3, 7),
        "Memcpy HtoD (Pinned -> Device)": ("MEMCPY", 3, 21),
        "Memset (Device)": ("MEMSET", 5, 9),
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL": ("KERNEL", 3, 20),
        "forward": ("OTHER", NONE, NONE),
        "gemv": ("OTHER", NONE, NONE),
    }


def test_jax_on_a_gpu(tmp_path: Path) -> None:
    assert by_name(gzip.compress(json.dumps(JAX_ON_GPU).encode()), tmp_path) == {
        "$train.py:12 main": Category.PYTHON,
        "$<unknown> __exit__": Category.PYTHON,
        "PjitFunction(step)": Category.CPU_OP,
        "cuLaunchKernel": Category.RUNTIME,
        "fusion_7": Category.KERNEL,
        "MemcpyD2D": Category.MEMCPY,
        "Memset 0": Category.MEMSET,
        "ProfilerStep#12": Category.GPU_ANNOTATION,
        "fusion": Category.GPU_ANNOTATION,
    }
    trace = chrome.read(tmp_path / "trace.json")
    steps = [row for row, name in enumerate(names(trace)) if name == "ProfilerStep#12"]
    assert [(trace.start_ns[row], trace.duration_ns[row]) for row in steps] == [(500, 19_000), (10_000, 8000)]
    assert [trace.category[row] for row in steps] == [Category.ANNOTATION, Category.GPU_ANNOTATION]
    kernel = names(trace).index("fusion_7")
    assert (trace.device[kernel], trace.stream[kernel]) == (1, 13)
    assert set(trace.device[trace.rows(Category.CPU_OP, Category.RUNTIME, Category.PYTHON)].tolist()) == {NONE}
    assert trace.parse_report.notes == ()


def test_jax_on_a_tpu_has_its_work_on_the_operations_thread(tmp_path: Path) -> None:
    events = [
        label("process", "/device:TPU:0", 3),
        label("thread", "XLA Modules", 3, 2),
        label("thread", "XLA Ops", 3, 3),
        label("thread", "Async XLA Ops", 3, 4),
        span("jit_step(123)", 3, 2, 0, 9),
        span("fusion.3", 3, 3, 0, 4),
        span("all-reduce-start.1", 3, 4, 1, 6),
    ]

    assert by_name(events, tmp_path) == {
        "jit_step(123)": Category.GPU_ANNOTATION,
        "fusion.3": Category.KERNEL,
        "all-reduce-start.1": Category.KERNEL,
    }


def test_several_devices_of_one_process_are_noted(tmp_path: Path) -> None:
    events = [
        *(label("process", f"/device:TPU:{device}", 3 + device) for device in (0, 1)),
        *(label("thread", "XLA Ops", 3 + device, 3) for device in (0, 1)),
        *(span("fusion", 3 + device, 3, 0) for device in (0, 1)),
    ]
    trace = read(tmp_path, events)

    assert trace.device.tolist() == [0, 1]
    assert "one process used 2 devices" in trace.parse_report.notes[0]


def test_a_category_goes_before_the_track(tmp_path: Path) -> None:
    events = [label("process", "/host:CPU", 10), event("with category"), {**event("without"), "cat": ""}]

    assert by_name(events, tmp_path) == {"with category": Category.CPU_OP, "without": Category.CPU_OP}
    assert by_name([event("kernel", cat="kernel"), events[0]], tmp_path) == {"kernel": Category.KERNEL}


HOROVOD = """[
{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "grad/dense"}},
{"name": "process_sort_index", "ph": "M", "pid": 1, "args": {"sort_index": 1}},
{"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 100, "pid": 1},
{"ph": "X", "name": "0", "ts": 101, "pid": 1, "dur": 0},
{"ph": "X", "name": "1", "ts": 140, "pid": 1, "dur": 0},
{"ph": "E", "ts": 150, "pid": 1},
{"ph": "B", "name": "ALLREDUCE", "ts": 150, "pid": 1},
{"ph": "B", "name": "NCCL_ALLREDUCE", "ts": 160, "pid": 1},
{"ph": "E", "ts": 180, "pid": 1},
{"ph": "E", "ts": 190, "pid": 1, "args": {"dtype": "float32", "shape": "[3, 2]"}},
"""


@pytest.mark.parametrize("end", ["{}]\n", ""])
def test_horovod(tmp_path: Path, end: str) -> None:
    assert by_name(HOROVOD + end, tmp_path) == {
        "NEGOTIATE_ALLREDUCE": Category.ANNOTATION,
        "0": Category.OTHER,
        "1": Category.OTHER,
        "ALLREDUCE": Category.ANNOTATION,
        "NCCL_ALLREDUCE": Category.ANNOTATION,
    }
    trace = chrome.read(tmp_path / "trace.json")
    assert trace.duration_ns.tolist() == [50_000, 0, 0, 40_000, 20_000]
    assert [thread.name for thread in trace.threads] == ["grad/dense"]
    assert trace.parse_report.truncated == (end == "")


def test_capitals_alone_are_no_horovod(tmp_path: Path) -> None:
    assert by_name([{**event("ALLREDUCE"), "cat": ""}], tmp_path) == {"ALLREDUCE": Category.OTHER}


def test_ranks_in_one_file_are_refused(tmp_path: Path) -> None:
    steps = [
        event(f"ProfilerStep#{step}", cat="user_annotation", pid=pid, ts=step) for step in (1, 2) for pid in (7, 8)
    ]
    with pytest.raises(TraceError, match=r"trace\.json: holds the training steps of 2 processes \(7, 8\).*own files"):
        chrome.read(save(tmp_path, steps))


def test_shadows_of_steps_and_other_threads_are_one_rank(tmp_path: Path) -> None:
    steps = [
        event("ProfilerStep#1", cat="user_annotation", pid=7, tid=7),
        event("ProfilerStep#1", cat="user_annotation", pid=7, tid=8),
        event("ProfilerStep#1", cat="gpu_user_annotation", pid=0),
    ]

    assert len(read(tmp_path, steps)) == 3


ASCEND = [
    label("process", "Python", 100),
    label("process", "CANN", 200),
    label("process", "Ascend Hardware", 300),
    label("thread", "Stream 46", 300, 46),
    label("thread", "Step Trace(Model ID:1)", 300, 70001),
    label("process", "Communication", 400),
    label("thread", "Group 1 Communication", 400, 3),
    label("thread", "Plane 0", 400, 4),
    label("process", "Overlap Analysis", 500),
    label("thread", "Computing", 500, 0),
    {**span("ProfilerStep#3", 100, 7, 0, 40), "cat": "cpu_op"},
    {**span("aten::mm", 100, 7, 1, 8), "cat": "cpu_op", "ts": "1.000", "args": {"Sequence number": 5}},
    {**span("Dequeue@aten::mm", 100, 8, 2, 3), "cat": "dequeue", "args": {"correlation_id": 9}},
    {**span("Node@launch", 200, 8, 3), "args": {"Mode": "launch", "connection_id": 4}},
    {**span("MatMulV2", 300, 46, 10, 5), "args": {"Task Type": "AI_CORE", "connection_id": 4}},
    span("EVENT_WAIT", 300, 46, 15, 2),
    span("MEMCPY_ASYNC", 300, 46, 17, 3),
    span("Reduce_1_0", 300, 70001, 10, 9),
    span("hcom_allReduce__844_2_1", 400, 3, 20, 9),
    span("Notify_Wait", 400, 4, 20, 4),
    span("Computing", 500, 0, 10, 5),
]
"""A file of torch_npu, ``trace_view.json``: a list, in which times are text."""


def test_ascend(tmp_path: Path) -> None:
    assert by_name(ASCEND, tmp_path) == {
        "ProfilerStep#3": Category.ANNOTATION,
        "aten::mm": Category.CPU_OP,
        "Dequeue@aten::mm": Category.OTHER,
        "Node@launch": Category.RUNTIME,
        "MatMulV2": Category.KERNEL,
        "EVENT_WAIT": Category.SYNC,
        "MEMCPY_ASYNC": Category.MEMCPY,
        "Reduce_1_0": Category.GPU_ANNOTATION,
        "hcom_allReduce__844_2_1": Category.KERNEL,
        "Notify_Wait": Category.GPU_ANNOTATION,
        "Computing": Category.GPU_ANNOTATION,
    }
    trace = chrome.read(tmp_path / "trace.json")
    row = {name: at for at, name in enumerate(names(trace))}
    assert trace.stream[row["MatMulV2"]] == 46
    assert trace.correlation[row["MatMulV2"]] == trace.correlation[row["Node@launch"]] == 4
    assert trace.thread[row["Node@launch"]] == trace.thread[row["Dequeue@aten::mm"]], "the thread is the program's own"
    assert trace.start_ns[row["aten::mm"]] == 1000


def test_profiler_of_autograd(tmp_path: Path) -> None:
    events = [
        {"name": "mm", "ph": "X", "ts": 1.5, "dur": 9, "tid": 1, "pid": "CPU functions", "args": {}},
        {"name": "    mm", "ph": "X", "ts": 12, "dur": 3, "tid": 0, "pid": "CUDA functions", "args": {}},
    ]

    assert by_name(events, tmp_path) == {"mm": Category.CPU_OP, "    mm": Category.KERNEL}


def test_unitrace(tmp_path: Path) -> None:
    events = [
        event("zeCommandListAppendLaunchKernel", cat="cpu_op"),
        event("gemm_kernel[SIMD32 {1568; 1; 1} {512; 1; 1}]", cat="gpu_op", pid=4294950911, tid=4294950910),
        event("zeCommandListAppendMemoryCopy(M2D)[4096 bytes]", cat="gpu_op", pid=4294950911, tid=4294950910),
    ]

    assert list(by_name(events, tmp_path).values()) == [Category.RUNTIME, Category.KERNEL, Category.MEMCPY]


def unknown_device(count: int) -> list[dict[str, Any]]:
    tasks = [{**span("task", 300, 5, 10 * at, 5), "cat": "tensor_core"} for at in range(count)]
    return [label("process", "Foo Accelerator", 300), *(event("aten::mm", ts=10 * at) for at in range(12)), *tasks]


def test_a_process_of_unknown_events_may_be_a_device(tmp_path: Path) -> None:
    assert read(tmp_path, unknown_device(20)).parse_report.unread_processes == ("Foo Accelerator",)
    summary = perfscope.analyze(tmp_path / "trace.json", executor=Serial())
    assert "which may be its devices" in summary.verdict.headline
    assert any("Foo Accelerator" in note.text for note in summary.notes if note.kind == "device_events_unread")


def test_few_events_that_describe_a_recording_are_no_device_s(tmp_path: Path) -> None:
    assert read(tmp_path, unknown_device(3)).parse_report.unread_processes == ()
    kernel = event("gemm", cat="kernel", pid=0, tid=7)
    assert read(tmp_path, [*unknown_device(20), kernel]).parse_report.unread_processes == ()
