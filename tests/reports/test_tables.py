"""Cells and columns of a table, and what is shown of many rows that are alike."""

from __future__ import annotations

from perfscope.reports import tables
from perfscope.reports.tables import OUTLYING_SHOWN, HtmlTable, collapsed, in_unit
from perfscope.text import unit_for


def test_a_columns_numbers_share_their_decimals() -> None:
    unit = unit_for(126_400.0)
    assert [in_unit(us, unit, 126_400.0) for us in (126_400.0, 300.0, 4.0, 0.0)] == ["126.4", "0.3", "<0.1", "0"]


def of_ranks(waits: list[float], aligned: list[str] | None = None) -> HtmlTable:
    ranks = range(len(waits))
    columns = [tables.ranks("Rank", list(ranks)), tables.durations("Wait", waits)]
    return tables.table("t", "T", [*columns, tables.words("Aligned", aligned or ["yes"] * len(waits))])


def names(table: HtmlTable) -> list[str]:
    return [row[0].text for row in table.short]


def test_few_rows_are_all_shown() -> None:
    assert collapsed(of_ranks([1.0] * 15 + [9.0])).short == ()


def test_of_many_rows_those_that_differ_are_shown_and_one_for_the_rest() -> None:
    """100 µs on each rank with a spread of 1; rank 7 waits 150, rank 9 is not aligned."""
    waits = [100.0 + at % 2 for at in range(40)]
    waits[7] = 150.0
    table = of_ranks(waits, ["no" if rank == 9 else "yes" for rank in range(40)])
    assert names(collapsed(table)) == ["7", "9", "38 other ranks, like rank 0"]
    assert collapsed(table).short[-1][1].order == 100.0
    assert names(collapsed(table, marked={"3"}))[:2] == ["3, straggler", "7"]
    assert len(collapsed(table).rows) == 40


def test_of_too_many_that_differ_the_farthest_are_shown() -> None:
    """20 of 100 are off, each farther than the one before."""
    table = of_ranks([100.0] * 80 + [200.0 + at for at in range(20)])
    found = names(collapsed(table))
    assert found[:2] == ["99", "98"]
    assert len(found) == OUTLYING_SHOWN + 1
    assert found[-1] == "88 other ranks, among them rank 0"


def test_rows_are_compared_with_those_of_their_kind() -> None:
    """Two kinds of eight groups each; one group of the second is slow, which is fast beside the first kind."""
    kinds = ["all-reduce"] * 8 + ["all-gather"] * 8
    waits = [500.0] * 8 + [50.0] * 7 + [90.0]
    columns = [tables.words("Kind", kinds), tables.words("Group", [f"dp{at}" for at in range(16)])]
    table = tables.table("t", "T", [*columns, tables.durations("Wait", waits)])
    found = collapsed(table, "group", named=1, by=(0,), most=3)
    assert [row[1].text for row in found.short] == ["8 groups, like dp0", "dp15", "7 other groups, like dp8"]
