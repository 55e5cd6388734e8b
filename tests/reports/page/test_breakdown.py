"""The time breakdown in numbers: of many ranks those that differ, and one line for the others."""

from __future__ import annotations

from dataclasses import replace

from perfscope.reports.page import breakdown
from tests.reports.examples import breakdown as row
from tests.reports.examples import straggler


def test_equal_ranks_are_one_line() -> None:
    """20 ranks of 100 ms: rank 7 computes 30 ms longer, rank 9 transfers 10 ms more, rank 11 hardly differs."""
    rows = [row(rank, compute=60.0, exposed_comm_wait=40.0) for rank in range(20)]
    rows[7] = row(7, compute=90.0, exposed_comm_wait=10.0)
    rows[9] = row(9, compute=50.0, exposed_comm_wait=40.0, exposed_comm_transfer=10.0)
    rows[11] = row(11, compute=61.0, exposed_comm_wait=39.0)
    table = breakdown.outlying_table(replace(straggler(), time_breakdown=tuple(rows), stragglers=()))
    assert table is not None
    assert [cells[0].text for cells in table.rows] == ["rank 7", "rank 9", "18 other ranks, like rank 0"]
    compute = [column.label for column in table.columns].index("Compute")
    assert [cells[compute].text for cells in table.rows] == ["90.0", "50.0", "60.0"]
    assert table.reading == "2 ranks differ by more than 5% of the step."


def test_a_straggler_is_among_them_however_little_it_differs() -> None:
    rows = tuple(row(rank, compute=60.0) for rank in range(20))
    table = breakdown.outlying_table(replace(straggler(), time_breakdown=rows))
    assert table is not None
    assert [cells[0].text for cells in table.rows] == [
        "rank 1, straggler",
        "rank 2, straggler",
        "18 other ranks, like rank 0",
    ]


def test_few_ranks_are_all_shown() -> None:
    assert breakdown.outlying_table(straggler()) is None
