"""Which rank a file is of, without reading its events."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.readers import chrome, chrome_window
from tests.analyzers.readers.helpers import event, save

OWNER = {"distributedInfo": {"backend": "nccl", "rank": 5, "world_size": 16, "pg_config": [{"ranks": [1]}, {"a": {}}]}}
MANY = {"traceEvents": [event(f"op {at} " + "x" * 200) for at in range(40_000)]}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    "document",
    [{**OWNER, **MANY}, {**MANY, **OWNER, "traceName": "x"}, {"traceEvents": [event()], **OWNER}],
    ids=["before", "after", "after a few"],
)
def test_owner(tmp_path: Path, document: dict[str, Any], pack, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(chrome_window, "read_events", None)  # not called
    path = save(tmp_path, pack(json.dumps(document).encode()))

    assert chrome.peek(path) == chrome.Peek(True, 5, 16)


def test_owner_at_the_end_of_a_large_packed_file_stays_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, gzip.compress(json.dumps({**MANY, **OWNER}).encode()))
    monkeypatch.setattr(chrome, "_CHEAP_TO_UNPACK", 1000)

    assert chrome.peek(path) == chrome.Peek(True)


def test_owner_in_damaged_and_cut_files(tmp_path: Path) -> None:
    text = json.dumps({"INFO": "x", **OWNER, "traceEvents": [event()]}).replace('"x"', '"a "b" c"')

    assert chrome.peek(save(tmp_path, text)) == chrome.Peek(True, 5, 16)
    assert chrome.peek(save(tmp_path, text[:-30])) == chrome.Peek(True, 5, 16)


@pytest.mark.parametrize(
    ("content", "is_chrome"),
    [
        ([event()], True), ({"traceEvents": []}, True), ('{"schemaVersion": 1, "deviceProperties": [{"id"', True),
        ([{"a": 1}], False), ({"a": [event()]}, False), ("", False), ("[]", False), ("text", False), (b"\0\1", False),
        ({"schema": "perfscope.run/1", "rank": 0}, False), ([], False), ("3", False),
    ],
)  # fmt: skip
def test_is_it_a_trace_at_all(tmp_path: Path, content: Any, is_chrome: bool) -> None:
    assert chrome.peek(save(tmp_path, content)) == chrome.Peek(is_chrome)
