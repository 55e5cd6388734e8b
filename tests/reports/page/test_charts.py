"""What-if curves and the critical path."""

from __future__ import annotations

import dataclasses
import math

import pytest

from perfscope.reports.page import charts
from perfscope.results.rows import PathRow
from tests.reports import pictures
from tests.reports.examples import gpu, straggler


def test_a_curve_names_the_best_value_and_its_speedup() -> None:
    (curve,) = charts.curves(dataclasses.replace(gpu(), curves=pictures.curves()))
    assert curve.reading == (
        "Best: 4 workers with 412 ms per step; current: 1 worker with 455 ms. Predicted speedup: 1.1x."
    )
    (row,) = pictures.curves()
    unset, best = (dataclasses.replace(row, current=current) for current in (None, 4))
    assert "not recorded" in charts.curves(dataclasses.replace(gpu(), curves=(unset,)))[0].reading
    assert "as good as any" in charts.curves(dataclasses.replace(gpu(), curves=(best,)))[0].reading


def test_a_default_that_is_not_the_least_is_not_called_best() -> None:
    (row,) = pictures.curves()
    least = min(row.points, key=lambda point: point.mid_us)
    other = next(point.value for point in row.points if point.mid_us > least.mid_us)
    unset = dataclasses.replace(row, current=None, best=other)
    assert "No value saves more than 2% over" in charts.curves(dataclasses.replace(gpu(), curves=(unset,)))[0].reading


def test_the_path_of_many_ranks_keeps_all_of_its_time() -> None:
    rows = tuple(PathRow(rank=rank, category="compute", us=1000.0 + rank) for rank in range(20))
    summary = dataclasses.replace(straggler(), critical_path=rows)
    made = charts.path_chart(summary)
    assert made is not None
    assert len(made["rows"]) == charts.PATH_RANKS_SHOWN + 1
    assert made["rows"][-1] == "12 others"
    size = {"µs": 1.0, "ms": 1e3}[made["unit"]]
    assert math.fsum(made["values"]["compute"]) * size == pytest.approx(sum(one.us for one in rows), rel=1e-3)
