"""When a terminal gets colours."""

from __future__ import annotations

import io

import pytest

from perfscope.reports.paint import PLAIN, Paint


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": "1"}, False)],
    ids=["terminal", "dumb", "NO_COLOR"],
)
def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], coloured: bool) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "90")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Paint.of(Terminal()) == Paint(coloured, 90)
    assert Paint.of(io.StringIO()) is PLAIN


def test_a_bar_is_as_long_as_its_share() -> None:
    bar = Paint(coloured=True).bar(0.5, cells=10)
    assert bar.count("█") == 5
    assert PLAIN.bar(0.5) == ""
