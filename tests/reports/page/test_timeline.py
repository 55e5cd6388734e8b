"""The timeline of one step: what its caption says."""

from __future__ import annotations

from perfscope.reports.page import timeline
from tests.reports.examples import gpu


def test_the_timeline_names_which_collective_is_longest_and_splits_it() -> None:
    reading = timeline.timeline_reading(gpu())
    assert reading.startswith("Step 17.")
    assert "all-gather of 386 MiB" in reading
    assert "waiting" in reading
