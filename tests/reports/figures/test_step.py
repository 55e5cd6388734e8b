"""One step of all ranks, and the critical path."""

from __future__ import annotations

import dataclasses
import math

import pytest
from plotly.graph_objects import Figure

from perfscope.reports.figures import step
from perfscope.results.rows import PathRow
from tests.reports.examples import healthy, straggler


def test_the_path_of_many_ranks_keeps_all_of_its_time() -> None:
    rows = tuple(PathRow(rank=rank, category="compute", us=1000.0 + rank) for rank in range(20))
    made = step.path_figure(dataclasses.replace(straggler(), critical_path=rows))
    assert made is not None
    (compute,) = Figure(made).data
    assert len(compute.y) == step.PATH_RANKS_SHOWN + 1
    assert compute.y[-1] == "12 others"
    assert Figure(made).layout.xaxis.title.text.startswith("ms ")
    assert math.fsum(compute.x) * 1e3 == pytest.approx(sum(one.us for one in rows), rel=1e-3)


def test_a_crowded_step_is_drawn_in_bins_that_keep_its_shares() -> None:
    """3 ranks of 10,000 stretches each, compute and launch in turn, 3 to 1."""
    summary = healthy()
    names = ("compute", "compute", "compute", "idle_launch") * 2500
    strips = tuple(
        dataclasses.replace(
            summary.step_timeline[0],
            rank=rank,
            categories=names,
            start_us=tuple(map(float, range(10_000))),
            duration_us=(1.0,) * 10_000,
        )
        for rank in range(3)
    )
    made = step.step_figure(dataclasses.replace(summary, step_timeline=strips))
    assert made is not None
    assert sum(len(trace.x) for trace in Figure(made).data) <= 6000
    for rank in range(3):
        drawn = [x for trace in Figure(made).data for x, y in zip(trace.x, trace.y, strict=True) if y == str(rank)]
        assert math.fsum(drawn) == pytest.approx(10.0)  # ms
