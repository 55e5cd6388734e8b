"""A result takes the place of the former one whole, or leaves it as it was."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from perfscope.recording.whole import replacing, write_text


def half_written(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"half")
        raise ZeroDivisionError


def test_a_failure_leaves_the_former_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_text(path, "former")
    with pytest.raises(ZeroDivisionError):
        half_written(path)
    assert path.read_text() == "former"
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_a_full_disk_leaves_the_former_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_text(path, "former")
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write_text(path, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_text() == "former"
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_a_kill_leaves_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_text(path, "former")
    code = (
        "import os, pathlib, signal; from perfscope.recording.whole import replacing\n"
        f"with replacing(pathlib.Path({str(path)!r})) as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert path.read_text() == "former"


def test_several_at_once_leave_one_of_theirs_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    code = (
        "import pathlib, sys; from perfscope.recording.whole import write_text\n"
        f"for _ in range(50): write_text(pathlib.Path({str(path)!r}), sys.argv[1] * 200_000)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, letter]) for letter in "abc"]
    seen, running = set(), True
    while running:
        running = any(writer.poll() is None for writer in writers)
        if path.exists():
            text = path.read_text()
            seen.add((len(text), len(set(text))))
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert seen == {(200_000, 1)}
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_a_pipe_stays_a_pipe_and_a_link_stays_a_link(tmp_path: Path) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "through")
    reader.join()
    assert read == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    link.symlink_to(target)
    write_text(link, "behind")
    assert link.is_symlink()
    assert target.read_text() == "behind"


def test_half_a_surrogate_pair_does_not_fail(tmp_path: Path) -> None:
    write_text(tmp_path / "page", "a\ud800b")
    assert (tmp_path / "page").read_bytes() == b"a?b"
