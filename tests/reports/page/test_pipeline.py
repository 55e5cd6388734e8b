"""The pipeline on the page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perfscope.reports.figures.pipeline import pipeline_figure, stage_stretches
from perfscope.reports.page.page import render
from perfscope.reports.page.pipeline import reading, stage_table, values
from perfscope.results.tables import Pipeline, StageRow
from tests.reports.examples import healthy, strip


def stage(number: int, busy: float, start: float, steady: float, drain: float = 0.0, **more: Any) -> StageRow:
    """Times in ms."""
    times = {"busy_us": busy, "bubble_start_us": start, "bubble_steady_us": steady, "bubble_drain_us": drain}
    known: dict[str, Any] = {
        "stage": number, "ranks": (2 * number, 2 * number + 1), "forward_us": None, "backward_us": None,
        "flops_per_step": None, **{name: 1000 * ms for name, ms in times.items()}, **more,
    }  # fmt: skip
    return StageRow(**known)


PIPELINE = Pipeline(
    stages=(stage(0, 80.0, 0.0, 20.0), stage(1, 60.0, 10.0, 25.0, 5.0)), microbatches=8, virtual_stages=1,
    schedule="1f1b", bubble_share=0.3, ideal_bubble_share=1 / 9, imbalance=80 / 70, degree=2,
)  # fmt: skip

STRIPS = (
    strip(0, ("compute", 30.0), ("exposed_comm_wait", 20.0), ("compute", 30.0), ("exposed_comm_transfer", 20.0)),
    strip(2, ("exposed_comm_wait", 40.0), ("compute", 40.0), ("exposed_comm_wait", 0.1), ("compute", 19.9)),
)


def test_the_reading_says_how_it_works_and_what_it_must_cost() -> None:
    assert reading(PIPELINE) == (
        "2 stages, 8 micro-batches per step; schedule: one forward, one backward (1F1B). Bubbles take 30% of the step; "
        "with balanced stages: 11%. Stage 0 is the busiest: 1.14x the mean."
    )


def test_a_bubble_below_the_ideal_one_is_not_set_against_it() -> None:
    assert "Bubbles take 10% of the step, no more than the 11% inherent" in reading(replace(PIPELINE, bubble_share=0.1))


def test_the_reading_of_a_part_says_that_it_is_one() -> None:
    part = replace(
        PIPELINE, stages=PIPELINE.stages[:1], degree=4, bubbles_are_bounds=True, imbalance=1.0, schedule="unknown",
        microbatches=None, ideal_bubble_share=None,
    )  # fmt: skip
    assert reading(part) == (
        "4 stages; schedule: not recognized. Bubbles take at most 30% of the step. 3 stages not recorded."
    )


def test_the_table_shows_only_what_is_known() -> None:
    table = stage_table(PIPELINE)
    assert [column.label for column in table.columns] == [
        "Stage", "Ranks", "Busy", "Warm-up bubble", "Steady bubble", "Drain bubble", "Bubble share",
    ]  # fmt: skip
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["0", "0, 1", "80.0", "0", "20.0", "0", "20%"],
        ["1", "2, 3", "60.0", "10.0", "25.0", "5.0", "40%"],
    ]
    marked = replace(
        PIPELINE, stages=(stage(0, 80.0, 0.0, 20.0, forward_us=1e3, backward_us=2e3, flops_per_step=2e12),)
    )
    assert [column.label for column in stage_table(marked).columns][-3:] == ["Forward", "Backward", "Model FLOPs"]


def test_bars_hold_the_whole_of_a_step() -> None:
    stages = stage_stretches(PIPELINE, STRIPS)
    assert list(stages) == ["stage 0 · rank 0", "stage 1 · rank 2"]
    first, second = stages.values()
    assert first == [("busy", 0.0, 30e3), ("bubble", 30e3, 50e3), ("busy", 50e3, 100e3)]
    # Too short to be seen: it goes to the work around it.
    assert second == [("bubble", 0.0, 40e3), ("busy", 40e3, pytest.approx(100e3))]


def test_without_neighbours_transfers_may_be_waits() -> None:
    first, _ = stage_stretches(replace(PIPELINE, bubbles_are_bounds=True), STRIPS).values()
    assert [kind for kind, _, _ in first] == ["busy", "bubble", "busy", "bubble"]


def test_no_strips_no_picture() -> None:
    assert stage_stretches(PIPELINE, ()) == {}
    assert stage_stretches(PIPELINE, (strip(9, ("compute", 1.0)),)) == {}
    assert pipeline_figure(replace(healthy(), pipeline=PIPELINE, step_timeline=())) is None


def test_the_page_has_a_section_only_where_there_is_a_pipeline() -> None:
    assert values(healthy()) == {"pipeline": None}
    assert 'id="pipeline"' not in render(healthy())
    page = render(replace(healthy(), pipeline=PIPELINE, step_timeline=STRIPS))
    assert 'id="pipeline"' in page
    assert 'href="#pipeline"' in page
    assert 'id="chart-pipeline"' in page
