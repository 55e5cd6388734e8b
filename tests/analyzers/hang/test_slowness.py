"""Whether a job stands still or is only slow: the same dumps, written at different times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perfscope.analyzers.hang.answer import find_hang
from tests.analyzers.hang.dumps import MS, START_NS, Groups, dumps, op

WORLD: Groups = {"0": ("default_pg", range(4))}
SECOND = 1000 * MS


def _ops(waiting: bool) -> list[dict[str, Any]]:
    """Ten all-reduces, one every 100 ms, and one that is open from 1.1 s."""
    done = [op("0", number, at_ms=100 * number) for number in range(1, 11)]
    return [*done, op("0", 11, at_ms=1100, state="started")] if waiting else done


@pytest.mark.parametrize(
    ("late_ns", "missing"),
    [(50 * MS, None), (30 * SECOND, (2,)), (600 * SECOND, (2,)), (90 * 24 * 3600 * SECOND, (2,))],
    ids=["while it works", "by hand", "by the watchdog", "a copy"],
)
def test_dumps_that_were_written_while_events_came_are_of_a_job_that_works(
    late_ns: int, missing: tuple[int, ...] | None
) -> None:
    made = dumps(WORLD, {rank: _ops(rank != 2) for rank in range(4)})
    hang = find_hang(
        {rank: replace(each, modified_ns=START_NS + 1100 * MS + late_ns) for rank, each in made.items()}, {}
    )
    assert (hang.missing_ranks if hang else None) == missing


def test_the_dump_of_a_job_that_is_done_shows_no_hang_at_any_time() -> None:
    made = dumps(WORLD, {rank: _ops(False) for rank in range(4)})
    late = {rank: replace(each, modified_ns=START_NS + 60 * SECOND) for rank, each in made.items()}
    assert find_hang(late, {}) is None


def test_where_most_ranks_are_late_only_a_silence_shows_that_the_job_stands_still() -> None:
    """Ranks 0 to 2 of four on their way: usual in a job that works, a fault of three ranks in one that is silent."""
    made = dumps(WORLD, {rank: _ops(rank == 3) for rank in range(4)})
    silent = {rank: replace(each, modified_ns=START_NS + 60 * SECOND) for rank, each in made.items()}
    hang = find_hang(silent, {})
    assert hang is not None
    assert hang.missing_ranks == (0, 1, 2)
    assert find_hang(made, {}) is None
