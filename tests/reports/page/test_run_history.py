"""Step times of the whole run."""

from __future__ import annotations

import dataclasses

from perfscope.reports.page import overview, page, run_history
from tests.reports import pictures
from tests.reports.examples import gpu
from tests.reports.examples import summary as summary_of


def test_step_times_alone_are_shown_with_their_stages_and_claim_no_missing_steps() -> None:
    job = dataclasses.replace(gpu().job, steps=(), step_time_us_per_step=())
    summary = summary_of(job=job, history=pictures.history(), verdict=gpu().verdict)
    table = run_history.stages_table(summary)
    assert table is not None
    assert [column.label for column in table.columns] == [
        "Rank", "Steps", "Mean step", "Forward", "Backward", "Dataloader",
    ]  # fmt: skip
    assert [cell.text for cell in table.rows[0]] == ["0", "1,000", "420.0", "150.0", "200.0", "70.0"]
    html = page.render(summary)
    assert "No steps were found" not in html
    assert 'id="change"' not in html
    assert run_history.stages_table(dataclasses.replace(gpu(), history=pictures.history())) is None


def test_the_run_that_slowed_down_and_its_outlier_are_reported() -> None:
    summary = dataclasses.replace(gpu(), history=pictures.history())
    reading = run_history.history_reading(summary)
    assert "the last tenth of the run was 10% slower than the first" in reading
    assert "step 412 with 1.30 s, in dataloader on rank 0" in reading
    table = run_history.outlier_table(summary)
    assert table is not None
    assert [cell.text for cell in table.rows[0]] == ["412", "1.300", "3.1x", "dataloader", "0", "ranks 0, 1"]
    assert "The last tenth of the run was 10% slower" in overview.since(summary)
