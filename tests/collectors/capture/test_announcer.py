"""When recording starts and stops: one rank says so, in lines of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perfscope.collectors.capture.announcer import Announcer
from perfscope.collectors.config import CollectorConfig


@contextmanager
def standard_error(target: int) -> Iterator[None]:
    """The process's standard error goes to the open file ``target``."""
    before = os.dup(2)
    os.dup2(target, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def announcer(rank: int = 0, ranks: str = "all", *, announce: bool = True) -> Announcer:
    return Announcer(CollectorConfig(output="/r", package_root="/p", ranks=ranks, announce=announce), rank)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "perfscope: profiler on: 3 warm-up steps, then steps 8-15 are recorded\n"),
        ("step 4\n", "step 4\nperfscope: profiler on: 3 warm-up steps, then steps 8-15 are recorded\n"),
        (" 40%|####", " 40%|####\nperfscope: profiler on: 3 warm-up steps, then steps 8-15 are recorded\n"),
    ],
    ids=["nothing yet", "a whole line", "a progress bar"],
)
def test_a_line_begins_where_the_last_one_ended(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "log"
    with path.open("w") as log:
        log.write(before)
        log.flush()
        with standard_error(log.fileno()):
            announcer().begins(8, 3, 8)
    assert path.read_text() == after


def test_where_the_last_line_is_not_known_it_is_ended() -> None:
    reading, writing = os.pipe()
    with standard_error(writing):
        announcer().ends(5, 1)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "\nperfscope: profiler off: step 5 is recorded\n"


@pytest.mark.parametrize(
    ("rank", "ranks", "announce", "speaks"),
    [(0, "all", True, True), (1, "all", True, False), (3, "3-7,9", True, True), (0, "all", False, False)],
    ids=["rank 0", "another", "the first chosen", "quiet"],
)
def test_one_rank_speaks(tmp_path: Path, rank: int, ranks: str, announce: bool, speaks: bool) -> None:
    with (tmp_path / "log").open("w") as log, standard_error(log.fileno()):
        announcer(rank, ranks, announce=announce).begins(1, 0, 2)
    assert bool((tmp_path / "log").read_text()) is speaks


def test_a_closed_standard_error_costs_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with standard_error(writing):
        announcer().ends(5, 1)
    os.close(writing)
