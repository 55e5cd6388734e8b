"""The line that says how far the reading is."""

from __future__ import annotations

import io

import pytest

from perfscope.cli.progress import READ, progress_line, reading


@pytest.mark.parametrize(
    ("done", "elapsed_s", "line"),
    [
        (0, 3.0, "reading traces ░░░░░░░░░░░░░░░░░░░░ 0 of 8"),
        (2, 10.0, "reading traces █████░░░░░░░░░░░░░░░ 2 of 8, about 30 s left"),
        (2, 100.0, "reading traces █████░░░░░░░░░░░░░░░ 2 of 8, about 5 min left"),
        (7, 0.7, "reading traces █████████████████░░░ 7 of 8"),
    ],
)
def test_what_is_left_is_as_fast_as_what_was_read(done: int, elapsed_s: float, line: str) -> None:
    assert progress_line(done, 8, elapsed_s) == line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with reading() as show:
        assert show is not None
        show(1, 2)
        show(2, 2)
    *_, read, end = terminal.getvalue().split("\r\x1b[K")
    assert (read, end) == (READ, "")


@pytest.mark.parametrize(("terminal", "term"), [(io.StringIO(), "xterm"), (Terminal(), "dumb")])
def test_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO, term: str) -> None:
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", term)
    with reading() as show:
        assert show is None
    assert terminal.getvalue() == ""
