"""Overlap, last arrivals and bandwidth."""

from __future__ import annotations

import dataclasses
import math

import pytest
from plotly.graph_objects import Figure

from perfscope.reports.figures import communication
from perfscope.results.tables import GroupRow
from tests.reports.examples import EXAMPLES, healthy


@pytest.mark.parametrize("name", EXAMPLES)
def test_arrivals_and_overlap_add_up(name: str) -> None:
    summary = EXAMPLES[name]()
    arrivals = communication.arrivals_figure(summary)
    if arrivals is not None:
        assert math.fsum(part for trace in Figure(arrivals).data for part in trace.y) == pytest.approx(1.0, abs=0.01)
    overlap = communication.overlap_figure(summary)
    if overlap is not None:
        size = {"µs": 1.0, "ms": 1e3, "s": 1e6}[Figure(overlap).layout.yaxis.title.text.split()[0]]
        whole = [sum(parts) for parts in zip(*(trace.y for trace in Figure(overlap).data), strict=True)]
        expected = [row.comm_us / size for row in summary.time_breakdown if row.comm_us > 0]
        assert whole == pytest.approx(expected, rel=1e-3)


def test_of_many_groups_those_of_one_role_are_one_colour() -> None:
    row = dataclasses.replace(healthy().collectives[0], ranks=(0, 1), last_arriver={0: 0.5, 1: 0.5})
    names = [f"group {number}" for number in range(communication.GROUPS_SHOWN + 1)]
    groups = tuple(
        GroupRow(name=name, ranks=(0, 1), role="tensor", role_from="its name", comm_us=1.0, across_hosts=None)
        for name in names
    )
    many = tuple(dataclasses.replace(row, group=name) for name in names)
    made = communication.last_arrivals(dataclasses.replace(healthy(), collectives=many, groups=groups))
    assert made is not None
    assert list(made.shares) == ["tensor groups"]
