"""The machines on the page: tables, the chart and the text about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from plotly.graph_objects import Figure

from perfscope.reports.figures.system import SERIES_SHOWN, system_figure
from perfscope.reports.page import page
from perfscope.reports.page.definitions import DEFINITIONS
from perfscope.reports.page.system import system_reading, system_tables
from perfscope.reports.tables import HtmlTable
from perfscope.results.summary import Summary
from perfscope.results.system import DeviceRow, HostRow, ProcessRow, Series, System
from tests.reports.examples import healthy, summary


def host(name: str = "node7", **changes: Any) -> HostRow:
    known: dict[str, Any] = {
        "host": name, "ranks": (0, 1), "samples": 9, "cores": 8, "cores_usable": 8.0, "cpu_share": 0.42,
        "runnable": 5.0, "job_cores": 3.2, "cpu_pressure_share": 0.1, "memory_used_bytes": 6 << 30,
        "throttled_share": 0.0, "disk_read_bytes_per_s": 2e6,
    }  # fmt: skip
    return HostRow(**{**dict.fromkeys(HostRow.__dataclass_fields__), **known, **changes})


def device(index: int, **changes: Any) -> DeviceRow:
    known: dict[str, Any] = {
        "host": "node7", "index": index, "name": "NVIDIA H100 80GB HBM3", "ranks": (index,), "utilisation": 0.9,
        "sm_mhz": 1500.0, "sm_mhz_max": 2000.0, "power_w": 350.0, "power_limit_w": 700.0, "temperature_c": 66.0,
        "throttled": {},
    }  # fmt: skip
    return DeviceRow(**{**dict.fromkeys(DeviceRow.__dataclass_fields__), **known, **changes})


def series(what: str, values: tuple[float, ...], name: str = "node7", index: int | None = None) -> Series:
    return Series(host=name, device=index, what=what, time_us=tuple(5e5 * n for n in range(len(values))), values=values)


def process(rank: int, **changes: Any) -> ProcessRow:
    known: dict[str, Any] = {"rank": rank, "host": "node7", "cores": 0.8, "threads": 12.0, "workers": 0}
    return ProcessRow(**{**dict.fromkeys(ProcessRow.__dataclass_fields__), **known, **changes})


def monitored(**parts: Any) -> Summary:
    example = healthy()
    known = {"hosts": (host(),), "devices": (), "processes": (), "window_us": (0.0, 2e6)}
    return summary(
        job=example.job,
        verdict=example.verdict,
        time_breakdown=example.time_breakdown,
        system=System(**{**known, **parts}),
    )


def tables(**parts: Any) -> dict[str, HtmlTable]:
    return {table.name: table for table in system_tables(monitored(**parts))}


def cells(table: HtmlTable, label: str) -> list[str]:
    index = [column.label for column in table.columns].index(label)
    return [row[index].text for row in table.rows]


class TestTables:
    def test_hosts(self) -> None:
        table = tables(hosts=(host(), host("node8", ranks=(2, 3), cpu_share=None, throttled_share=0.2)))["hosts"]
        assert cells(table, "Host") == ["node7", "node8"]
        assert cells(table, "CPU busy") == ["42%", "–"]
        assert cells(table, "CPU throttled") == ["–", "20%"]
        assert cells(table, "Disk read") == ["1.91 MiB/s", "1.91 MiB/s"]
        assert "RDMA in" not in [column.label for column in table.columns]

    def test_devices(self) -> None:
        rows = (device(0), device(1, ranks=(), throttled={"power cap": 0.25, "hardware thermal slowdown": 0.75}))
        table = tables(devices=rows)["devices"]
        assert cells(table, "of maximum") == ["75%", "75%"]
        assert cells(table, "of limit") == ["50%", "50%"]
        assert cells(table, "Clocks limited by") == ["–", "hardware thermal slowdown 75%, power cap 25%"]
        assert cells(table, "Ranks") == ["0", "–"]

    def test_processes(self) -> None:
        plain = tables(processes=(process(0, waited_share=0.2),))["processes"]
        assert [column.label for column in plain.columns] == ["Rank", "CPU used", "Threads", "Waited for a core"]
        loading = tables(processes=(process(0), process(1, workers=4, worker_cores=0.95, worker_cores_max=1.0)))
        assert cells(loading["processes"], "CPU per worker") == ["–", "0.950"]

    def test_every_definition_is_there(self) -> None:
        made = tables(devices=(device(0),), processes=(process(0, workers=1),))
        named = {column.definition for table in made.values() for column in table.columns if column.definition}
        assert named <= set(DEFINITIONS)
        assert len(named) >= 10

    def test_nothing_was_sampled(self) -> None:
        assert system_tables(summary(job=healthy().job, verdict=healthy().verdict)) == ()


class TestPicture:
    def test_a_row_for_each_quantity(self) -> None:
        courses = (
            series("cpu", (0.5, 0.7)), series("utilisation", (0.9, 1.0), index=0), series("clock", (1.0, 0.9), index=0)
        )  # fmt: skip
        chart = system_figure(monitored(series=courses, devices=(device(0),)))
        assert chart is not None
        titles = [Figure(chart).layout[axis].title.text for axis in ("yaxis", "yaxis2", "yaxis3")]
        assert titles == ["GPU busy, %", "clock, % of maximum", "CPU busy, %"]
        lines = [(line.name, line.yaxis, list(line.x), list(line.y)) for line in Figure(chart).data]
        assert lines[0] == ("GPU 0", "y", [0, 500], [90, 100])
        assert lines[2] == ("node7", "y3", [0, 500], [50, 70])
        assert (Figure(chart).layout.shapes[0].x0, Figure(chart).layout.shapes[0].x1) == (0, 2000)  # ms

    def test_of_many_devices_the_least_busy_are_drawn(self) -> None:
        courses = tuple(series("utilisation", (index / 16, index / 16), index=index) for index in range(16))
        chart = system_figure(monitored(series=courses, devices=tuple(device(index) for index in range(16))))
        assert chart is not None
        names = [line.name for line in Figure(chart).data]
        assert names == [f"GPU {index}" for index in range(SERIES_SHOWN)]

    def test_hosts_are_named_where_there_are_several(self) -> None:
        chart = system_figure(
            monitored(hosts=(host(), host("node8")), series=(series("utilisation", (1.0, 1.0), index=3),))
        )
        assert chart is not None
        assert Figure(chart).data[0].name == "node7 GPU 3"

    def test_it_describes_what_it_shows(self) -> None:
        devices = (device(0, utilisation=0.95), device(1, utilisation=0.31), device(2, utilisation=0.0, ranks=()))
        shown = (series("cpu", (0.5, 0.7)), series("utilisation", (0.9, 1.0), index=0))
        reading = system_reading(monitored(devices=devices, series=shown))
        assert "the ranks' GPUs were busy 31% to 95% of the time; the CPU of node7 was 42% busy." in reading
        assert "2 hosts and devices not drawn." in reading

    def test_no_picture_without_courses(self) -> None:
        assert system_figure(monitored()) is None
        assert 'id="chart-system"' not in page.render(monitored())


class TestPage:
    def test_names_from_the_recording_are_escaped(self) -> None:
        html = page.render(monitored(hosts=(host("<script>alert(1)</script>"),)))
        assert "<script>alert(1)" not in html

    @pytest.mark.browser
    def test_the_picture_has_its_lines_and_its_shade(self, look_at: Callable[..., Any]) -> None:
        courses = (
            series("cpu", (0.5, 0.7, 0.6)),
            *(series("utilisation", (0.9, 1.0, 0.4), index=index) for index in (0, 1)),
            *(series("clock", (1.0, 0.9, 0.8), index=index) for index in (0, 1)),
        )
        tab = look_at(monitored(series=courses, devices=(device(0), device(1)), processes=(process(0),)), width=900)
        assert tab.locator("#chart-system svg .scatterlayer .trace").count() == 5
        assert tab.locator("#chart-system svg .shapelayer path").count() == 1
        assert tab.locator("#chart-system svg .legend .traces").count() == 3
        assert tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
