"""Flight-recorder dumps from anybody: read where they are what torch writes, refused where they are anything else."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.readers import flight, plain_pickle
from perfscope.errors import TraceError
from tests.analyzers.hang.dumps import START_NS, Groups, document, op
from tests.analyzers.readers.flight_fuzz import mutations, strange

GROUPS: Groups = {"0": ("default_pg", (0, 1)), "3": ("PP", (0, 4))}
FRAMES = [{"name": "step", "filename": "train.py", "line": 12}]
ENTRIES = [op("0", 1), op("3", 1, "send 0->1", at_ms=5), op("0", 2, at_ms=10, state="started", frames=FRAMES)]


class Evil:
    """Would run a command, were it unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("looked up",)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_pickles_are_read_as_python_reads_them(protocol: int) -> None:
    value = {"a": [1, -1, 256, 70_000, 2**40, -(2**70), 1.5], "b": [None, True, False, (), ("x", 1)], "ü": {"c": []}}
    value["again"] = value["a"]
    assert plain_pickle.loads(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("value", [Evil(), Path("x"), print, {1, 2}, b"bytes", complex(1, 2)])
def test_nothing_but_plain_data_is_read(value: object, protocol: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="not plain data"):
        plain_pickle.loads(pickle.dumps({"entries": value}, protocol))
    assert capsys.readouterr().out == ""


def test_no_class_is_looked_up_even_if_an_opcode_got_through() -> None:
    with pytest.raises(ValueError, match="not plain data"):
        plain_pickle._Unpickler(io.BytesIO(pickle.dumps(print, 2))).load()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x80\x02]r" + struct.pack("<I", 2**32 - 1) + b"0.", "not plain data"),
        (b"\x80\x02" + b"(" * (plain_pickle.MAX_NOTES + 1) + b".", "marks"),
        (b"\x80\x02N\x85\x85.", "tuple of containers"),
        (b"\x80\x02N\x85q\x00(h\x00h\x00t.", "tuple of containers"),
        (b"\x80\x02}(}Nu.", "damaged"),
        (b"\x80\x02X" + struct.pack("<I", 2**31) + b"abc", "cut short"),
        (b"\x80\x02]", "cut short"),
        (b"", "cut short"),
        (b"\x80\x02N(Ne.", "damaged"),
        (b"\x80\x02" + b"]" * (plain_pickle.MAX_CONTAINERS + 1) + b".", "lists and dictionaries"),
        (b"\x80\x02]r" + struct.pack("<I", 2**20) + b".", "not plain data"),  # as much memory as its index says
        (b"\x80" * (plain_pickle.MAX_BYTES + 1), "MiB"),
    ],
)
def test_bounds(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plain_pickle.loads(data)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x80\x04\x95" + b"\xff" * 8 + b"].", []),  # a frame's size is left out
        (b"\x80\x02X\x04\x00\x00\x00a\xff\xc3\xa4.", "a???"),
        (b"\x80\x02](" + b"K\x07N" * 5000 + b"e.", [7, None] * 5000),  # more than is looked at at once
    ],
)
def test_parts_that_are_read_otherwise(data: bytes, value: object) -> None:
    assert plain_pickle.loads(data) == value


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_columns(form: str) -> None:
    made = document(GROUPS, ENTRIES)
    dump = flight.parse(pickle.dumps(made, 2) if form == "pickle" else json.dumps(made).encode())
    assert [(group.name, group.description, group.ranks) for group in dump.groups] == [
        ("0", "default_pg", (0, 1)),
        ("3", "PP", (0, 4)),
    ]
    assert dump.group.tolist() == [0, 1, 0]
    assert dump.p2p.tolist() == [False, True, False]
    assert dump.sequence.tolist() == [1, 1, 2]
    assert dump.state.tolist() == [flight.DONE, flight.DONE, flight.STARTED]
    assert dump.created_ns.tolist() == [START_NS, START_NS + 5_000_000, START_NS + 10_000_000]
    assert [dump.kinds[kind].operator for kind in dump.kind] == ["all_reduce", "send", "all_reduce"]
    assert dump.kinds[dump.kind[1]].peer == 1
    assert dump.kinds[dump.kind[0]].input_sizes == ((1024,),)
    assert dump.frames == {2: (flight.Frame("train.py", 12, "step"),)}
    assert dump.last_ns == START_NS + 10_000_000


def test_numbers_that_json_gives_as_text() -> None:
    status = {"0": {"last_enqueued_collective": "7", "last_started_collective": "-1", "last_completed_collective": "6"}}
    dump = flight.parse(json.dumps(document(GROUPS, ENTRIES, pg_status=status)).encode())
    assert dump.status == {0: flight.GroupStatus(enqueued=7, completed=6)}


def test_status_of_a_group_without_entries() -> None:
    """Ids count a rank's groups in the order of their making, as their names do: 0 and 2 are ``0`` and ``3``."""
    fields = {"last_enqueued_collective": 4, "last_completed_collective": 4}
    dump = flight.parse(json.dumps(document(GROUPS, ENTRIES[:1], pg_status={"0": fields, "2": fields})).encode())
    assert {dump.groups[index].name for index in dump.status} == {"0", "3"}


@pytest.mark.parametrize(
    "data", [b"{}", b"[]", b'{"traceEvents": []}', b"{", b"\xff\xfe", pickle.dumps([1], 2), b"[" * 10_000]
)
def test_what_is_no_dump_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(data)
    with pytest.raises(TraceError, match="nccl_trace_rank_0"):
        flight.read(path)


def test_one_list_in_many_places_is_looked_at_once() -> None:
    """300 lists of 300 references each: written out they were 300 to the power of their depth."""
    sizes: list[Any] = [1]
    for _ in range(50):
        sizes = [sizes] * 300
    made = document(GROUPS, [op("0", 1)])
    made["entries"][0]["input_sizes"] = sizes
    assert flight.parse(pickle.dumps(made, 2)).kinds[0].input_sizes == ((),) * 300


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_mutated_dumps_are_read_or_refused(form: str) -> None:
    made = document(GROUPS, ENTRIES, pg_status={"0": {"last_enqueued_collective": 1, "last_completed_collective": 1}})
    data = pickle.dumps(made, 2) if form == "pickle" else json.dumps(made).encode()
    refused = 0
    for mutated in mutations(data, random.Random(3), 300):
        try:
            flight.parse(mutated)
        except ValueError:
            refused += 1
    assert 0 < refused < 300


def test_values_of_other_types_count_as_absent() -> None:
    made, rng = document(GROUPS, ENTRIES, pg_status={"0": {"last_enqueued_collective": 1}}), random.Random(5)
    for _ in range(300):
        dump = flight.parse(pickle.dumps(strange(made, rng), 2))
        assert len(dump.group) <= len(ENTRIES)
