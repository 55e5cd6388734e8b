"""What-if curves in words."""

from __future__ import annotations

import dataclasses
import re

from perfscope.reports.page import charts
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


def test_a_straggler_of_other_steps_that_waits_in_the_shown_one_is_not_waited_for_there() -> None:
    summary = straggler()
    reading = charts.strips_reading(summary)
    assert "the others wait for " in reading
    longest = re.search(r"Rank (\d+) waits longest", reading)
    assert longest is not None
    waiting = int(longest[1])
    rows = (dataclasses.replace(summary.stragglers[0], rank=waiting, ranks=(waiting,)), *summary.stragglers[1:])
    reading = charts.strips_reading(dataclasses.replace(summary, stragglers=rows))
    assert "the others wait for " not in reading
    assert re.search(r"waits longest \(.*\), rank \d least \(", reading)
