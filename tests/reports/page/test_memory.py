"""Memory on the page: the table, the chart and its caption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from plotly.graph_objects import Figure

from perfscope.reports.figures.memory import SHOWN, memory_figure
from perfscope.reports.page import page
from perfscope.reports.page.memory import memory_reading, memory_table
from perfscope.reports.tables import HtmlTable
from perfscope.results.rows import MemoryRow
from perfscope.results.summary import Summary
from perfscope.results.tables import MemoryTimeline
from tests.reports.examples import gpu, healthy, summary

GIB = 1 << 30


def strip(rank: int, gib: tuple[float, ...], held: float | None = None, device: int = 0) -> MemoryTimeline:
    """A course with a point every 10 ms."""
    return MemoryTimeline(
        rank=rank,
        device=device,
        time_us=tuple(10_000.0 * number for number in range(len(gib))),
        allocated_bytes=tuple(int(value * GIB) for value in gib),
        reserved_bytes=tuple(None if held is None else int(held * GIB) for _ in gib),
    )


def with_memory(*strips: MemoryTimeline, rows: tuple[MemoryRow, ...] = ()) -> Summary:
    example = healthy()
    return summary(
        job=example.job,
        verdict=example.verdict,
        time_breakdown=example.time_breakdown,
        memory_timeline=strips,
        memory=rows,
    )


def cells(table: HtmlTable | None, label: str) -> list[str]:
    assert table is not None
    index = [column.label for column in table.columns].index(label)
    return [row[index].text for row in table.rows]


class TestTable:
    def test_a_column_only_for_what_some_rank_knows(self) -> None:
        row = MemoryRow(rank=0, peak_bytes=60 * GIB, capacity_bytes=80 * GIB)
        table = memory_table([row])
        assert table is not None
        assert [column.label for column in table.columns] == ["Rank", "Reserved peak", "Capacity", "of capacity"]
        assert cells(table, "of capacity") == ["75%"]

    def test_everything_that_is_known(self) -> None:
        rows = [
            MemoryRow(
                rank=rank, peak_bytes=60 * GIB, capacity_bytes=80 * GIB, allocated_peak_bytes=45 * GIB,
                fragmentation=0.25, headroom_bytes=20 * GIB, allocation_retries=rank,
            )
            for rank in (0, 1)
        ]  # fmt: skip
        table = memory_table(rows)
        assert cells(table, "Headroom") == ["20.00", "20.00"]
        assert cells(table, "Allocated peak") == ["45.00", "45.00"]
        assert cells(table, "Fragmentation") == ["25%", "25%"]
        assert cells(table, "Allocation retries") == ["0", "1"]
        assert table is not None
        assert "Rank 1 ran out of memory and emptied the allocator's cache 1 time;" in table.reading

    def test_the_host_s_memory_is_called_so(self) -> None:
        row = MemoryRow(rank=0, peak_bytes=None, capacity_bytes=None, allocated_peak_bytes=GIB, kind="host")
        table = memory_table([row])
        assert cells(table, "Memory of") == ["host"]
        assert table is not None
        assert "Peak" not in [column.label for column in table.columns]
        assert table.reading == "Host memory: these ranks have no device."

    def test_capacity_alone_is_no_table(self) -> None:
        assert memory_table([MemoryRow(rank=0, peak_bytes=None, capacity_bytes=80 * GIB)]) is None
        assert memory_table([]) is None


class TestPicture:
    def test_values_in_one_unit(self) -> None:
        rows = (MemoryRow(rank=0, peak_bytes=60 * GIB, capacity_bytes=80 * GIB),)
        chart = memory_figure(with_memory(strip(0, (10, 45, 12), held=60), rows=rows))
        assert chart is not None
        tensors, held, capacity = Figure(chart).data
        assert (tensors.name, list(tensors.x), list(tensors.y)) == ("rank 0", [0, 10, 20], [10, 45, 12])
        assert (held.line.dash, list(held.y)) == ("dash", [60, 60, 60])
        assert list(capacity.y) == [80, 80]
        assert Figure(chart).layout.xaxis.title.text.startswith("ms ")
        assert Figure(chart).layout.yaxis.title.text == "GiB"
        assert memory_reading(with_memory(strip(0, (10, 45, 12), held=60), rows=rows)) == (
            "On rank 0 tensors take 10.0 GiB to 45.0 GiB; the allocator reserves 60.0 GiB."
        )

    def test_capacity_is_left_out_where_it_would_flatten_the_course(self) -> None:
        rows = (MemoryRow(rank=0, peak_bytes=2 * GIB, capacity_bytes=80 * GIB),)
        chart = memory_figure(with_memory(strip(0, (1, 2)), rows=rows))
        assert chart is not None
        assert [trace.name for trace in Figure(chart).data] == ["rank 0"]

    def test_of_many_ranks_the_fullest_and_the_emptiest_are_shown(self) -> None:
        example = with_memory(*(strip(rank, (1, 1 + (rank * 7) % 20)) for rank in range(20)))
        chart = memory_figure(example)
        assert chart is not None
        names = [trace.name for trace in Figure(chart).data]
        assert len(names) == SHOWN
        assert {"rank 17", "rank 0"} <= set(names)  # 17 * 7 % 20 = 19
        assert memory_reading(example).startswith("4 of 20 ranks, the fullest among them. On rank 17 ")

    def test_the_host_s_course_says_what_it_leaves_out(self) -> None:
        example = with_memory(strip(0, (0.25, 0.5), device=-1))
        chart = memory_figure(example)
        assert chart is not None
        assert [trace.name for trace in Figure(chart).data] == ["rank 0, host"]
        assert memory_reading(example).endswith(
            "of host memory, without what was allocated before the profiler started."
        )

    def test_nothing_recorded_is_no_picture(self) -> None:
        assert memory_figure(with_memory()) is None
        assert memory_reading(with_memory()) == ""
        assert 'id="chart-memory"' not in page.render(gpu())


@pytest.mark.browser
def test_the_browser_draws_a_line_for_each_course(look_at: Callable[..., Any]) -> None:
    rows = (MemoryRow(rank=0, peak_bytes=60 * GIB, capacity_bytes=80 * GIB),)
    tab = look_at(with_memory(strip(0, (10, 45, 12), held=60), rows=rows))
    assert tab.locator("#chart-memory svg .scatterlayer .trace").count() == 3
    assert "rank 0 tensors take" in tab.locator("figure:has(#chart-memory) figcaption").inner_text()
