"""Any trace is read as ``json`` reads it, wherever the buffer happens to cut it."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfscope.analyzers.readers import chrome
from perfscope.trace.trace import NONE, CollectiveArgs, MemoryCounter, ParseReport, Trace
from tests.analyzers.readers import naive
from tests.analyzers.readers.helpers import event, save

NAMES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.sampled_from(
        ['{lambda()#1}, {"ph": 1}', '}, {"name":', "a]}", '"', "\\", "\\u", '], "x": [{', "ProfilerStep", "é"]
    ),
)
IDS = st.integers(0, 1 << 40)
TIMES = st.one_of(st.integers(0, 10**10), st.integers(0, 10**13).map(lambda ns: ns / 1000))
DIMS = st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3)
NESTED = st.sampled_from([[{"name": "x"}, {"ph": "X"}], {"a": [{}, {}]}, "}, {", None, 1.5])


@st.composite
def events(draw: st.DrawFn) -> dict[str, Any]:
    phase = draw(st.sampled_from("XXXXXsfMi"))
    entry: dict[str, Any] = {
        "ph": phase,
        "cat": draw(st.sampled_from([*naive.CATEGORY, "Trace", "new"])),
        "name": draw(NAMES),
        "pid": draw(st.one_of(st.integers(0, 3), st.just("Spans"))) if phase != "X" else draw(st.integers(0, 3)),
        "tid": draw(st.integers(0, 3)),
        "ts": draw(TIMES),
    }
    if phase == "X":
        entry["dur"] = draw(TIMES)
    args: dict[str, Any] = {
        "External id": IDS, "correlation": IDS, "device": st.integers(0, 7), "stream": IDS, "Input Dims": DIMS,
        "Input type": st.lists(NAMES, max_size=2), "Concrete Inputs": st.lists(NAMES, max_size=2), "Other": NESTED,
    }  # fmt: skip
    chosen = draw(st.sets(st.sampled_from(sorted(args))))
    if phase == "X" and (chosen or draw(st.booleans())):
        entry["args"] = {key: draw(args[key]) for key in sorted(chosen)}
    order = draw(st.permutations(sorted(entry)))
    return {key: entry[key] for key in order}


@st.composite
def documents(draw: st.DrawFn) -> str:
    found = [*draw(st.lists(events(), max_size=8)), event("at least one")]
    base = draw(st.integers(0, 2 * 10**18))
    document: Any = draw(
        st.sampled_from(
            [
                found,
                {"traceEvents": found},
                {"baseTimeNanoseconds": base, "x": [{}, {"ph": 1}], "traceEvents": found},
                {"traceEvents": found, "pg_config": [{"name": 1}, {"name": 2}], "baseTimeNanoseconds": base},
            ]
        )
    )
    return json.dumps(document, indent=draw(st.sampled_from([None, 0, 2])), ensure_ascii=draw(st.booleans()))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=documents(), slice_bytes=st.one_of(st.integers(1, 300), st.just(1 << 20)))
def test_any_trace_is_read_as_json_reads_it(tmp_path: Path, text: str, slice_bytes: int) -> None:
    trace = chrome.read(save(tmp_path, text), slice_bytes=slice_bytes)

    trace.self_check()
    assert naive.spelled_out(trace) == naive.events(json.loads(text, parse_float=Decimal))
    assert trace.parse_report == ParseReport()


def spelled(trace: Trace) -> dict[str, Any]:
    """Every field in a form that can be compared: strings and threads by value, their order means nothing."""
    by_value = naive.spelled_out(trace)
    collectives = {
        field.name: [
            value if field.name not in ("kind", "group", "ranks", "dtype") or value == NONE else trace.strings[value]
            for value in getattr(trace.collectives, field.name).tolist()
        ]
        for field in dataclasses.fields(CollectiveArgs)
    }
    memory = {field.name: getattr(trace.memory, field.name).tolist() for field in dataclasses.fields(MemoryCounter)}
    others = ("rank", "world_size", "groups", "devices", "has_shapes", "versions", "parse_report")
    return {
        "events": by_value,
        "collectives": collectives,
        "memory": memory,
        "strings": set(trace.strings),
        "threads": set(trace.threads),
        **{name: getattr(trace, name) for name in others},
    }


COLLECTIVE = {
    "Collective name": "allreduce",
    "Process Group Name": "0",
    "In msg nelems": 5,
    "Process Group Ranks": "[0]",
}
MIXED = json.dumps(
    {
        "distributedInfo": {"rank": 0, "pg_config": [{"pg_name": "0", "ranks": [0]}, {"pg_name": "1", "ranks": []}]},
        "traceEvents": [
            event("kernel {a}, {b}", cat="kernel", args={**COLLECTIVE, "device": 0, "stream": 3}),
            event("same time", ts=5, args={"Input Dims": [[1]], "frames": [{"name": "f"}, {"name": "g"}]}),
            event("same time", ts=5),
            {"ph": "i", "name": "[memory]", "ts": 3, "args": {"Total Allocated": 7}},
            {"ph": "s", "id": 1, "ts": 1},
            event("unreadable", ts="soon"),
            {"ph": "B", "name": "split", "pid": 1, "tid": 1, "ts": 2},
            {"ph": "E", "pid": 1, "tid": 1, "ts": 8},
            {"ph": "b", "name": "asynchronous"},
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "worker"}},
            event("BROKEN", ts=6),
            event("last", ts=1203462598738.25, cat="gpu_memcpy"),
        ],
        "tail": [{"name": 1}, {"name": 2}],
        "baseTimeNanoseconds": 77,
    }
).replace("BROKEN", 'mend "this"')


@pytest.mark.parametrize("slice_bytes", [1, 2, 3, 7, 64, 100, 256, 555, 1000])
def test_where_the_buffer_cuts_changes_nothing(tmp_path: Path, slice_bytes: int) -> None:
    path = save(tmp_path, MIXED)
    whole = chrome.read(path)

    assert (whole.parse_report.dropped_events, whole.parse_report.repaired_events) == (1, 1)
    assert len(whole) == 6
    assert spelled(chrome.read(path, slice_bytes=slice_bytes)) == spelled(whole)


def test_memory_does_not_grow_with_what_is_not_read(tmp_path: Path) -> None:
    flow = json.dumps({"ph": "f", "id": 1, "pid": 1, "tid": 1, "ts": 1.5, "cat": "ac2g", "name": "ac2g" * 50})
    text = f'{{"traceEvents": [{json.dumps(event())},' + ",\n".join([flow] * 60_000) + "]}"
    path = save(tmp_path, text)
    tracemalloc.start()
    try:
        trace = chrome.read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert len(trace) == 1
    assert len(text) > 15_000_000
    assert peak < 4_000_000
