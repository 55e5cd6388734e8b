"""The compiled scanner makes the trace that Python makes; it takes what is usual, and leaves to Python what it must."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.readers import chrome, chrome_scan
from perfscope.analyzers.readers.chrome_columns import category_of
from tests.analyzers.readers.helpers import differences, event, save
from tests.benchmarks import generate

pytestmark = pytest.mark.skipif(not chrome_scan.IS_BUILT, reason="the scanner is not built: pip install -e . makes it")

KERNEL = {"cat": "kernel", "name": "gemm", "pid": 0, "tid": 7}

SCANNED = {
    "nothing": "[]",
    "ordinary": [event("a"), event("a", ts=2.5), event("b", tid="main", args={"External id": 3, "Input Dims": [[2]]})],
    "white space": json.dumps([event("a", args={"Input Dims": [[1], []], "Input type": ["float", ""]})], indent=3),
    "three decimals": '[{"ph":"X","ts":1.5,"dur":0.001},{"ph":"X","ts":12345678.123000,"dur":3}]',
    "large times": [event(ts=1661203462598801, dur=3), event(ts=8999999999999999)],
    "escapes": [event('quote " \\ \n tab'), event("\u00e9\u4e2d"), event(args={"Input Dims": [["\u00e9"]]})],
    "utf-8": '[{"ph":"X","ts":1,"name":"\u00e9\u4e2d\U0001f600"}]',
    "ids": [
        event(**KERNEL, args={"device": 0, "stream": 18446744073709551615, "correlation": -5}),
        event(**KERNEL),
        event(**KERNEL, args={"device": "1", "stream": "23", "correlation": None, "external id": 4}),
        event(cat="python_function", args={"External id": 9}),
        event(args={"External id": -1, "external id": 8}),
    ],
    "ids of other tools": [
        event(**KERNEL, args={"connection_id": 5}), event(**KERNEL, args={"correlation_id": "6"}),
        event(**KERNEL, args={"correlation_id": 7, "correlation": 8}), event(args={"connection_id": None}),
    ],
    "device without arguments": [event(**{**KERNEL, "pid": "GPU 3", "tid": "stream 12"}), event(**KERNEL, args={})],
    "old and unknown categories": [event(cat="Operator"), event(cat="cuda_driver"), event(cat=""), event(cat="zzz")],
    "steps": [event(cat="", args={"step_num": 12}), event(cat="cpu_op", args={"step_num": 3})],
    "a collective": [
        event("record", args={"Collective name": "allreduce", "Process Group Name": "1", "Seq": 4, "dtype": "Float",
                              "In msg nelems": 12, "Process Group Ranks": "[0, 1]"}),
        event(**{**KERNEL, "name": "ncclKernel"}, args={"Process Group Name": "2", "Process Group Ranks": [0, 1]}),
    ],
    "kernels of CUDA graphs": [
        event(**KERNEL, args={"device": 0, "stream": 7, "graph id": 0, "graph node id": 0}),
        event(**KERNEL, args={"stream": 7, "graph id": 3, "graph node id": (3 << 32) | 5, "correlation": 9}),
        event(**KERNEL, args={"graph id": 3, "graph node id": 6, "name": "loss", "autograd_phase": "backward"}),
        event(**KERNEL, args={"graph node id": "12884901895", "str": "attention", "Collective name": "allreduce"}),
        event(**{**KERNEL, "cat": "gpu_memcpy"}, args={"graph id": 3, "graph node id": 8}),
        event(args={"graph node id": 9}),
    ],
    "names of threads": [
        event(), {"ph": "M", "name": "thread_name", "pid": 10, "tid": 11, "args": {"name": "main"}},
        {"ph": "M", "name": "process_name", "pid": 10, "args": {"name": "python"}},
    ],
    "memory": [
        event(),
        {"ph": "i", "name": "[memory]", "ts": 4.5, "args": {"Total Allocated": 5, "Device Id": 0, "Device Type": 1}},
        {"ph": "i", "name": "other", "s": "t"},
    ],
    "arrows and counters": [event(), {"ph": "s", "id": 1, "bp": "e"}, {"ph": "f"}, {"ph": "C", "args": {"x": 1.5}}],
    "not read": [event(), {"ph": "b", "id": 1}, {"ph": "N"}],
    "a key twice": '[{"ph":"X","ts":1,"ts":2,"name":"a","name":"b","pid":1,"pid":2}]',
    "members that begin as in the event before": json.dumps(
        [event("long enough a name for a block", ts=at, dur=3 ** at, args=args) for at, args in enumerate([
            {"a text": "it says this and that and more of it", "External id": 1, "Call stack": "", "Input Dims": [[2]]},
            {"a text": "it says this and that and more of that", "External id": 12, "Call stack": "x"},
            {"a text": "it says this and that and more of it", "External id": 123, "Call stack": "", "correlation": 7},
            {"a text": 12, "External id": 1234, "Input Dims": [[2, 3]], "Call stack": ""},
            {"a text": 123, "correlation": 71, "External id": 99999999999999999999 % (1 << 64)},
            {}, {"External id": 5}, {"Call stack": "", "External id": 51}, *[{f"key {n}": n} for n in range(3)],
            {f"key {n}": str(n) for n in range(40)}, {f"key {n}": str(n + n % 7) for n in range(40)},
        ])] * 2, indent=1,
    ),
    "values that stand again, go on, or change their kind": json.dumps(
        [event("a", cat=cat, pid=pid, tid=tid, args={"Input Dims": dims, "Input type": types, "more": [pid]})
         for cat, pid, tid, dims, types in [
            ("cpu_op", 1234, "main", [[2], [30]], ["float"]), ("cpu_op", 1234, "main", [[2], [30]], ["float"]),
            ("cpu_op", 12345, "main 2", [[2], [30], []], ["float", ""]), ("kernel", 1234, 7, 12, "[2]"),
            ("kernel", 123, 71, 123, None), ("cpu_op", "1234", "7", [[2], [30]], ["float"]),
        ]] * 2, indent=1,
    ),
    "nested like events": [event(args={"nested": [{"name": "x"}, {"ph": "X"}, True, False, None, -1.5, {}]})],
}  # fmt: skip
"""Content of traces whose events the scanner takes."""

LEFT = {
    "four decimals": '[{"ph":"X","ts":1.2345,"dur":1}]',
    "an exponent": '[{"ph":"X","ts":1e3,"dur":1}]',
    "a time in quotes": [event(ts="12.5")],
    "no time": '[{"ph":"X","dur":1,"name":"lost"},{"ph":"X","ts":1,"name":"kept"}]',
    "before the base": [event(ts=-5)],
    "a negative duration": [event(dur=-1), event()],
    "beyond float64": '[{"ph":"X","ts":1,"dur":0,"args":{"x":1e999}},{"ph":"X","ts":2}]',
    "two halves": [{**event(), "ph": "B"}, {"ph": "E", "pid": 10, "tid": 11, "ts": 9}],
    "an unknown phase": [event(), {"ph": "Q"}],
    "no phase": [event(), {"name": "x"}],
    "a number for a name": [event(name=5)],
    "an id in words": [event(args={"device": "cuda:1"})],
    "a float for a process": [event(pid=1.0), event(pid=1)],
    "half a surrogate": '[{"ph":"X","ts":1,"name":"\\ud800"}]',
    "a pair of surrogates": '[{"ph":"X","ts":1,"name":"\\ud83d\\ude00"}]',
    "a control character": '[{"ph":"X","ts":1,"name":"a\tb"}]',
    "not utf-8": b'[{"ph":"X","ts":1,"name":"\xff"}]',
    "an escape in a key": '[{"ph":"X","ts":1,"\\u006eame":"a"}]',
    "a bare word": '[{"ph":"X","ts":1,"args":{"x":NaN}},{"ph":"X","ts":2}]',
    "deep nesting": '[{"ph":"X","ts":1,"args":{"x":' + "[" * 80 + "]" * 80 + "}}]",
    "a trailing comma": '[{"ph":"X","ts":1},]',
    "a leading zero": '[{"ph":"X","ts":01},{"ph":"X","ts":2}]',
    "cut": '[{"ph":"X","ts":1},{"ph":"X","ts":2,"na',
}
"""Content of traces in which something is left to Python."""


def read_both(path: Path, **options: Any) -> list[str]:
    """Differences between the traces of the two readers."""
    return differences(chrome.read(path, compiled=True, **options), chrome.read(path, compiled=False, **options))


def scan(path: Path) -> chrome_scan.ScannedBatch | None:
    text = bytearray(path.read_bytes())
    return chrome_scan.SliceScanner(category_of).scan(text, 0, len(text), last=True)


@pytest.mark.parametrize("name", [name for name in SCANNED if name != "nothing"])
def test_usual_events_are_scanned_with_the_same_result(name: str, tmp_path: Path) -> None:
    path = save(tmp_path, SCANNED[name])
    assert scan(path) is not None
    assert read_both(path) == []


@pytest.mark.parametrize("name", LEFT)
def test_what_is_doubtful_is_left_to_python(name: str, tmp_path: Path) -> None:
    path = save(tmp_path, LEFT[name])
    assert scan(path) is None
    assert read_both(path) == []


def test_an_empty_array_has_no_events(tmp_path: Path) -> None:
    batch = scan(save(tmp_path, SCANNED["nothing"]))
    assert batch is not None
    assert (batch.count, batch.closed, len(batch.columns[0])) == (0, True, 0)


def test_a_doubtful_slice_leaves_no_trace_in_the_next_ones(tmp_path: Path) -> None:
    """Its names and threads, which Python may repair or drop, must not take numbers."""
    usual = [event(f"op {at}", tid=at % 3, args={"Input Dims": [[at % 5]]}) for at in range(200)]
    texts = [json.dumps(each) for each in usual]
    texts[60:60] = ['{"ph":"X","ts":1,"dur":2,"name":"odd","tid":"odd","args":{"Input Dims":[[99]],"x":NaN}}']
    path = save(tmp_path, "[" + ",\n".join(texts) + "]")
    for slice_bytes in (200, 1000, 4096):
        assert read_both(path, slice_bytes=slice_bytes) == []


def test_slices_are_put_together_in_the_order_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Python decodes those between them, and wherever enough rows have come together."""
    usual = [event(f"op {at}", tid=at % 3, args={"Input Dims": [[at % 5]]}) for at in range(400)]
    texts = [json.dumps(each) for each in usual]
    for place in (350, 130, 60):
        texts[place:place] = ['{"ph":"X","ts":1,"dur":2,"name":"odd","tid":"odd","args":{"Input Dims":[[99]],"x":NaN}}']
    path = save(tmp_path, "[" + ",\n".join(texts) + "]")
    for rows in (1, 7, 100, 1000):
        monkeypatch.setattr(chrome_scan, "_ROWS_AT_ONCE", rows)
        assert read_both(path, slice_bytes=2000) == []


def test_every_slice_of_a_recording_is_scanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank0.json.gz"
    generate.write_rank(path, 0, 2, 300_000)
    assert read_both(path, slice_bytes=20_000) == []
    missed = []
    real = chrome_scan.SliceScanner.scan

    def watched(self: Any, data: bytearray, start: int, stop: int, *, last: bool) -> Any:
        found = real(self, data, start, stop, last=last)
        missed.append(found is None)
        return found

    monkeypatch.setattr(chrome_scan.SliceScanner, "scan", watched)
    chrome.read(path, slice_bytes=20_000)
    assert len(missed) > 10
    assert not any(missed)


def test_wrong_arguments_are_refused() -> None:
    scanner = chrome_scan._scan.Scanner(lambda _: 99, 0, 0, 3, 0)
    for start, stop in ((0, 9), (2, 1), (-1, 2)):
        with pytest.raises(ValueError, match="indices"):
            scanner.scan(bytearray(b"[]"), start, stop, True)
    text = bytearray(b'[{"ph":"X","ts":1}]')
    for _ in range(2):
        with pytest.raises(ValueError, match="category"):
            scanner.scan(text, 0, len(text), True)
