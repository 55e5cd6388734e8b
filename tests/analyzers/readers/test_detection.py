"""The kind of a file, by its content first, then by its name."""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path

import pytest

from perfscope.analyzers.readers import detect
from perfscope.errors import TraceError
from tests.analyzers.readers.helpers import event, save


def database(folder: Path, name: str, *tables: str) -> Path:
    path = folder / name
    connection = sqlite3.connect(path)
    for table in tables:
        connection.execute(f"CREATE TABLE {table} (id INTEGER)")
    connection.commit()
    connection.close()
    return path


def test_chrome_traces_under_any_name(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [event()]}).encode()

    assert detect(save(tmp_path, text, "report.sqlite")) == "chrome"
    assert detect(save(tmp_path, gzip.compress(text), "trace")) == "chrome"


def test_nsys_export_under_any_name(tmp_path: Path) -> None:
    assert detect(database(tmp_path, "trace.json", "StringIds", "NVTX_EVENTS")) == "nsys-sqlite"
    assert detect(database(tmp_path, "report.sqlite", "users")) == "unknown"


def test_damaged_database_is_recognized_by_its_name(tmp_path: Path) -> None:
    damaged = b"SQLite format 3\0" + b"\xff" * 200

    assert detect(save(tmp_path, damaged, "report.sqlite")) == "nsys-sqlite"
    assert detect(save(tmp_path, damaged, "report.db")) == "unknown"


def test_nsys_report_by_its_name(tmp_path: Path) -> None:
    assert detect(save(tmp_path, b"\x00\x01", "report.nsys-rep")) == "nsys-rep"


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 100, b"hello", b'{"schema": "perfscope.run/1"}', gzip.compress(b"", mtime=0)]
)
def test_anything_else_is_unknown(tmp_path: Path, content: bytes) -> None:
    assert detect(save(tmp_path, content, "trace.json")) == "unknown"


def test_folder_is_unknown_and_missing_file_an_error(tmp_path: Path) -> None:
    assert detect(tmp_path) == "unknown"
    with pytest.raises(TraceError, match=r"absent\.json: cannot be read"):
        detect(tmp_path / "absent.json")
