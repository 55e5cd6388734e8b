"""Hostile files beside one sound trace: each is named or passed over, in bounded time and memory."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.scale

EVENT = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "dur": 5.0}
SOUND = json.dumps({"traceEvents": [{**EVENT, "ts": 10.0 * at} for at in range(200)]})
MEASURED = (
    "import resource, subprocess, sys\n"
    "code = subprocess.run(sys.argv[1:]).returncode\n"
    "print('KiB:', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)\n"
    "sys.exit(code)"
)
MOST_MIB = 700
"""Of one process, whatever is in the folder: an interpreter with numpy and the reader take 150."""


def _bomb(path: Path, begin: bytes, filling: bytes) -> None:
    """A gigabyte that is a megabyte on the disk."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    with path.open("wb") as file:
        file.write(packer.compress(begin))
        for _ in range(64):
            file.write(packer.compress(filling * (1 << 24)))
        file.write(packer.flush())


def _zip(path: Path) -> None:
    archive = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED)
    with archive, archive.open("rank0.json", "w", force_zip64=True) as file:
        file.write(b'{"traceEvents":[')
        for _ in range(64):
            file.write(b" " * (1 << 24))


def _traversing(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../../escaped.json", "{}")


def _endless_view(path: Path) -> None:
    columns = "start, end, eventType, text, textId, globalTid, domainId"
    with sqlite3.connect(path) as database:
        database.executescript(
            "CREATE TABLE StringIds(id INTEGER PRIMARY KEY, value TEXT);"
            f"CREATE VIEW NVTX_EVENTS AS WITH RECURSIVE t({columns}) AS (SELECT 0, 1, 59, 'a', NULL, 1, 0 "
            "UNION ALL SELECT start + 1, end + 1, 59, 'a', NULL, 1, 0 FROM t) SELECT * FROM t;"
        )
    database.close()


def _long_line(path: Path) -> None:
    with path.open("wb") as file:
        file.write(json.dumps({"traceEvents": [EVENT]}).replace("aten::mm", "").rstrip('"}]').encode() + b', "name": "')
        for _ in range(32):
            file.write(b"b" * (1 << 24))


def _listen(path: Path) -> None:
    """A socket's file; its whole path would be too long for an address."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short, socket.socket(socket.AF_UNIX) as one:
        one.bind(f"{short}/s")
        Path(f"{short}/s").rename(path)


NAMED: dict[str, Callable[[Path], object]] = {
    "blanks.json.gz": lambda path: _bomb(path, b'{"traceEvents":[', b" "),
    "string.json.gz": lambda path: _bomb(path, b'{"traceEvents":[{"ph":"X","name":"', b"a"),
    "bomb.json.zip": _zip,
    "traversing.json.zip": _traversing,
    "deep.json": lambda path: path.write_bytes(b'{"traceEvents":' + b"[" * 1_000_000),
    "deep_args.json": lambda path: path.write_bytes(
        json.dumps({"traceEvents": [EVENT]}).encode()[:-3] + b', "args":' + b'{"a":' * 1_000_000
    ),
    "line.json": _long_line,
    "noise.json.gz": lambda path: path.write_bytes(os.urandom(100_000)),
    "zeros.json": lambda path: path.write_bytes(bytes(100_000)),
    "view.sqlite": _endless_view,
    "noise.sqlite": lambda path: path.write_bytes(b"SQLite format 3\0" + os.urandom(4080)),
    "empty.sqlite": lambda path: path.write_bytes(b""),
    **{f"small-{number:03}.json": lambda path: path.write_text("{}") for number in range(400)},
}
"""Each is a failure that names the file."""

PASSED_OVER: dict[str, Callable[[Path], object]] = {
    "pipe.json": os.mkfifo,
    "rank-00007.run.json": os.mkfifo,
    "rank-00007.steps.bin": os.mkfifo,
    "device.json": lambda path: path.symlink_to("/dev/zero"),
    "itself.json": lambda path: path.symlink_to("itself.json"),
    "folder.json": Path.mkdir,
    "socket.json": _listen,
}


def test_the_sound_trace_is_analyzed_and_the_others_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "rank1.json").write_text(SOUND)
    for name, make in {**NAMED, **PASSED_OVER}.items():
        make(folder / name)
    out = tmp_path / "summary.json"
    command = ("-m", "perfscope", "analyze", str(folder), "--workers", "1", "--json", str(out))
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, sys.executable, *command, "--output", str(tmp_path / "page.html")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PERFSCOPE_CACHE": "off"},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stdout + ran.stderr
    job = json.loads(out.read_text(encoding="utf-8"))["job"]
    assert len(job["ranks"]) == 1
    assert {Path(failure["path"]).name for failure in job["failures"]} == set(NAMED)
    assert not list(tmp_path.parent.rglob("escaped.json"))
    assert int(ran.stderr.rpartition("KiB: ")[2]) < MOST_MIB << 10
