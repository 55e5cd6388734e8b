"""Step times of the whole run."""

from __future__ import annotations

import dataclasses

from perfscope.reports.page import overview, run_history
from tests.reports import pictures
from tests.reports.examples import gpu


def test_the_run_that_slowed_down_and_its_outlier_are_reported() -> None:
    summary = dataclasses.replace(gpu(), history=pictures.history())
    reading = run_history.history_reading(summary)
    assert "the last tenth of the run was 10% slower than the first" in reading
    assert "step 412 with 1.30 s, in dataloader on rank 0" in reading
    table = run_history.outlier_table(summary)
    assert table is not None
    assert [cell.text for cell in table.rows[0]] == ["412", "1.300", "3.1x", "dataloader", "0", "ranks 0, 1"]
    assert "The last tenth of the run was 10% slower" in overview.since(summary)
