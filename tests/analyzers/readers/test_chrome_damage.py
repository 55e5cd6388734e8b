"""Files that are not quite JSON, and files that end too early: what can be read is, what cannot is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfscope.analyzers.readers import chrome
from perfscope.errors import TraceError
from tests.analyzers.readers.helpers import event, names, read, save

GOOD = '{"ph": "X", "cat": "kernel", "name": "before", "pid": 0, "tid": 7, "ts": 1, "dur": 1, "args": {"device": 0}}'
AFTER = GOOD.replace("before", "after").replace('"ts": 1', '"ts": 9')


def around(middle: str | bytes) -> bytes:
    """A file whose second event of three is ``middle``."""
    text = middle.encode() if isinstance(middle, str) else middle
    return (
        b'{"traceEvents": [\n' + GOOD.encode() + b",\n" + text + b",\n" + AFTER.encode() + b'\n], "record_shapes": 1}'
    )


def broken(name: str = '"odd"', rest: str = "") -> str:
    """An event at 5 µs with a name and arguments that are put into the text as they are."""
    return f'{{"ph": "X", "cat": "cpu_op", "name": {name}, "pid": 1, "tid": 2, "ts": 5, "dur": 2{rest}}}'


@pytest.mark.parametrize(
    ("middle", "name"),
    [
        (broken(rest=', "args": {"bandwidth": NaN}'), "odd"),
        (broken(rest=', "args": {"bandwidth": Infinity, "x": -Infinity}'), "odd"),
        (broken(rest=', "args": {"bandwidth": inf, "y": [-inf, -nan(ind), nan]}'), "odd"),
        (broken('"C:\\dir\\file.py(3): f"'), "C:\\dir\\file.py(3): f"),
        (broken('"C:\\users\\"'), "C:\\users\\"),
        (broken('"a "quoted" word"'), 'a "quoted" word'),
        (broken('"operator"" _x, "y", z"'), 'operator"" _x, "y", z'),
        (broken('"kernel<{lambda()#1}, {lambda()#2}> "x""'), 'kernel<{lambda()#1}, {lambda()#2}> "x"'),
        (broken('"bell\x01\x07"'), "bell\ufffd\ufffd"),
        (broken('"two\nlines\tand a tab"'), "two\nlines\tand a tab"),
        (broken('"half \\ud800 surrogate"'), "half \ufffd surrogate"),
        (broken('"bad \\u12 escape"'), "bad \\u12 escape"),
        (broken('"fine \\u00e9 \\n \\\\ \\" \x01"'), 'fine \u00e9 \n \\ " \ufffd'),
        (broken('"stack"', ', "args": {"Call stack": "a "b" c", "more": ["x "y" z", "w"]}'), "stack"),
        (broken('"bytes"').encode().replace(b"bytes", b"bad \xff\xfe utf-8"), "bad \ufffd\ufffd utf-8"),
    ],
)
def test_what_writers_get_wrong_is_mended(tmp_path: Path, middle: str | bytes, name: str) -> None:
    trace = read(tmp_path, around(middle))

    assert names(trace) == ["before", name, "after"]
    assert trace.start_ns.tolist() == [1000, 5000, 9000]
    assert (trace.parse_report.repaired_events, trace.parse_report.dropped_events) == (1, 0)
    assert not trace.parse_report.truncated


def test_repair_preserves_the_arguments(tmp_path: Path) -> None:
    text = broken(
        '"mm"', ', "args": {"bad": NaN, "External id": 7, "Input Dims": [[2, 3], []], "Input type": ["x "y""]}'
    )
    trace = read(tmp_path, around(text))

    assert trace.external_id[1] == 7
    assert trace.strings[trace.shapes[1]] == "[[2,3],[]]"
    assert json.loads(trace.strings[trace.types[1]]) == ['x "y"']


@pytest.mark.parametrize(
    "middle",
    [
        '{"ph": "X", "name": "no value", "ts": }',
        '{"ph": "X", "name": "number", "ts": 5.5.5, "dur": 1}',
        '{"name": "no phase", "ts": 5, "dur": 1}',
        '{"ph": 5, "name": "phase of another type", "ts": 5, "dur": 1}',
        '{"ph": "X", "name": "unfinished", "ts": 5, "args": {"x": [1, 2}',
        "17",
        '{"ph": "X", "name": "deep", "ts": 5, "args": ' + "[" * 5000 + "]" * 5000 + "}",
    ],
)
def test_what_cannot_be_mended_is_dropped_and_counted(tmp_path: Path, middle: str) -> None:
    trace = read(tmp_path, around(middle))

    assert names(trace) == ["before", "after"]
    assert trace.parse_report.dropped_events == 1
    assert trace.has_shapes


@pytest.mark.parametrize("middle", [broken('"a "b" c"'), broken(rest=', "args": {"x": NaN}')])
def test_damaged_first_and_last_events_are_mended_too(tmp_path: Path, middle: str) -> None:
    trace = read(tmp_path, f'{{"traceEvents": [{middle}], "distributedInfo": {{"rank": 4}}}}')

    assert (len(trace), trace.rank, trace.parse_report.repaired_events) == (1, 4, 1)


def test_mended_event_with_objects_that_look_like_events(tmp_path: Path) -> None:
    nested = ', "args": {"x": NaN, "list": [{"name": "a"}, {"name": "b"}]}'
    trace = read(tmp_path, around(broken(rest=nested)))

    assert names(trace) == ["before", "odd", "after"]


def test_commas_too_many(tmp_path: Path) -> None:
    trace = read(tmp_path, f'{{"traceEvents": [{GOOD},, {AFTER},\n]}}')

    assert names(trace) == ["before", "after"]
    assert not trace.parse_report.truncated


@pytest.mark.parametrize(
    "info", ['"a "quoted" message"', '["one", "two \\d"]', '"C:\\temp\\"', '"\x01"', "NaN", '{"a": inf, "b": {}}']
)
@pytest.mark.parametrize("place", ["before", "after"])
def test_damaged_metadata_still_has_the_rank(tmp_path: Path, info: str, place: str) -> None:
    metadata = f'"INFO": {info}, "distributedInfo": {{"rank": 1, "world_size": 2}}, "baseTimeNanoseconds": 1000'
    events = f'"traceEvents": [{GOOD}, {AFTER}]'
    trace = read(tmp_path, f"{{{metadata}, {events}}}" if place == "before" else f"{{{events}, {metadata}}}")

    assert (trace.rank, trace.world_size) == (1, 2)
    assert trace.start_ns.tolist() == [2000, 10_000]
    assert (trace.parse_report.repaired_events, trace.parse_report.truncated) == (1, False)


SMALL = json.dumps(
    {
        "distributedInfo": {"rank": 1, "world_size": 2},
        "traceEvents": [
            event("first", args={"Input Dims": [[1, 2]], "nested": [{"name": "x"}, {"name": "y"}]}),
            event('quotes " and } , { "ph": and \\', ts=2.125),
            {"ph": "M", "name": "thread_name", "pid": 10, "tid": 11, "args": {"name": "main"}},
            event("third", ts=3),
        ],
        "INFO": ["text ] } ,", {"name": 1}],
        "baseTimeNanoseconds": 0,
    }
).encode()


@pytest.mark.parametrize("slice_bytes", [16, 1 << 16])
def test_every_prefix_is_read_and_reported_as_truncated(tmp_path: Path, slice_bytes: int) -> None:
    all_names = names(read(tmp_path, SMALL))
    first = SMALL.index(b"}]}}") + len(b"}]}}")  # end of the first event
    kept = 0
    for length in range(len(SMALL)):
        path = save(tmp_path, SMALL[:length])
        if length < first:
            with pytest.raises(TraceError, match=r"trace\.json"):
                chrome.read(path, slice_bytes=slice_bytes)
            continue
        trace = chrome.read(path, slice_bytes=slice_bytes)
        trace.self_check()
        assert trace.parse_report.truncated
        assert trace.parse_report.dropped_events == trace.parse_report.repaired_events == 0
        assert trace.rank == 1
        assert len(trace) >= kept
        assert names(trace) == all_names[: len(trace)]
        kept = len(trace)
    assert kept == len(all_names) == 3


def test_missing_time_base_is_reported(tmp_path: Path) -> None:
    cut, whole = (read(tmp_path, SMALL[:length]) for length in (SMALL.index(b"INFO"), len(SMALL)))

    assert "the file ends before its time base" in cut.parse_report.notes[0]
    assert whole.parse_report.notes == ()


def test_bare_array_without_end_is_truncated_and_text_after_it_is_reported(tmp_path: Path) -> None:
    assert read(tmp_path, f"[{GOOD},\n{AFTER},\n").parse_report.truncated
    trace = read(tmp_path, f"[{GOOD}] {AFTER}")
    assert names(trace) == ["before"]
    assert trace.parse_report.notes == ("text after the event array was ignored",)


@pytest.mark.parametrize(
    "base", ["9223372036854775807", "-9223372036854775807", "9999999999999999999999", "1e30", "null", '"soon"']
)
def test_impossible_time_base_is_reported(tmp_path: Path, base: str) -> None:
    trace = read(tmp_path, f'{{"baseTimeNanoseconds": {base}, "traceEvents": [{GOOD}]}}')

    assert trace.start_ns.tolist() == [1000]
    assert "the time base cannot be read" in trace.parse_report.notes[0]


def test_times_beyond_what_is_held_are_dropped_and_counted(tmp_path: Path) -> None:
    trace = read(tmp_path, f'{{"traceEvents": [{event_at(0)}, {event_at(1e6)}, {event_at(9.3e15)}]}}')

    assert sorted(trace.start_ns.tolist()) == [0, 10**9]
    assert trace.parse_report.dropped_events == 1


def event_at(ts: float) -> str:
    return json.dumps(event(ts=ts, dur=0))


NESTED = ', "args": {"list": [{"name": "a"}, {"ph": "X"}, {"name": "b"}], "odd": [1, 2}}'


@pytest.mark.parametrize("slice_bytes", [1, 40, 200, 1 << 19])
@pytest.mark.parametrize("bare", [True, False])
def test_dropped_event_with_objects_that_look_like_events_costs_only_itself(
    tmp_path: Path, slice_bytes: int, bare: bool
) -> None:
    events = f"[{GOOD}, {broken(rest=NESTED)}, {AFTER}]"
    text = events if bare else f'{{"traceEvents": {events}, "distributedInfo": {{"rank": 3}}}}'
    trace = chrome.read(save(tmp_path, text), slice_bytes=slice_bytes)

    assert names(trace) == ["before", "after"]
    assert (trace.parse_report.dropped_events, trace.parse_report.notes) == (1, ())
    assert trace.rank == (None if bare else 3)


def test_events_after_a_false_end_are_reported(tmp_path: Path) -> None:
    trace = read(tmp_path, f'{{"traceEvents": [{GOOD}]}}, {AFTER}, {AFTER}]}}')

    assert names(trace) == ["before"]
    assert trace.parse_report.notes == (
        "text like events after the end of the event array was not read: the array may be damaged",
    )


def test_an_event_of_more_than_a_month_is_dropped_and_counted(tmp_path: Path) -> None:
    month_us = 30 * 86_400 * 10**6
    trace = read(tmp_path, around(f'{{"ph": "X", "cat": "cpu_op", "name": "long", "ts": 5, "dur": {month_us + 1}}}'))
    assert names(trace) == ["before", "after"]
    assert trace.parse_report.dropped_events == 1


@pytest.mark.parametrize("sign", [1, -1])
def test_an_event_years_from_all_others_is_dropped_and_counted(tmp_path: Path, sign: int) -> None:
    """Sums of so long a trace's times were not exact, and no analysis of the job was left."""
    years_us = sign * 10 * 365 * 86_400 * 10**6
    trace = read(tmp_path, around(f'{{"ph": "X", "cat": "cpu_op", "name": "far", "ts": {years_us + 1}, "dur": 2}}'))
    assert names(trace) == ["before", "after"]
    assert trace.parse_report.dropped_events == 1


@pytest.mark.parametrize("memory", ["9" * 400, 10**30, "85094825984"])
def test_a_device_memory_that_cannot_be_is_not_known(tmp_path: Path, memory: object) -> None:
    device = json.dumps({"id": 0, "name": "A100", "totalGlobalMem": memory})
    trace = read(tmp_path, f'{{"deviceProperties": [{device}], "traceEvents": [{GOOD}]}}')
    assert [each.memory_bytes for each in trace.devices] == [85094825984 if memory == "85094825984" else None]
