"""A pipeline stage with more work than the others: where it is named, and what even stages save."""

from __future__ import annotations

import pytest

from perfscope.analyzers.rules.ranks import pipeline_imbalance
from perfscope.results.findings import Obtained, Prediction, Severity
from perfscope.results.tables import StageRow
from tests.analyzers.job.pipelines.pipeline_jobs import FOUR, made, stage, waiting
from tests.analyzers.rules.jobs import STEP_US

UNEVEN = [stage(0), stage(1), stage(2), stage(3, busy=95_000.0, flops=2e12)]


def test_names_the_stage_and_what_even_ones_would_save() -> None:
    replayed = Prediction(low=80e3, mid=82e3, high=90e3)
    finding = pipeline_imbalance.evaluate(waiting(made(UNEVEN), balanced_step_us=replayed))
    assert finding is not None
    assert finding.title.startswith("Pipeline stage 3 has 1.60 times the work")
    assert (finding.severity, finding.obtained) == (Severity.MEDIUM, Obtained.REPLAYED)
    assert finding.ceiling == pytest.approx(100 / 82 - 1)
    assert finding.predicted_step_us == replayed
    assert "--decoder-last-pipeline-num-layers" in finding.action.how
    assert "split_spec" in finding.action.how


def test_is_bounded_where_steps_cannot_be_rereplayed() -> None:
    finding = pipeline_imbalance.evaluate(waiting(made(UNEVEN)))
    assert finding is not None
    assert finding.obtained is Obtained.BOUNDED
    # 95 against a mean of (3 * 70 + 95) / 4 = 76.25 ms.
    assert finding.ceiling == pytest.approx(STEP_US / (STEP_US - 18_750) - 1)


@pytest.mark.parametrize(
    "rows",
    [
        FOUR,
        [*FOUR[:3], stage(3, busy=95_000.0)],
        [*FOUR[:3], stage(3, busy=80_000.0, flops=1.12e12)],
        [*FOUR[:2], stage(2, busy=90_000.0), stage(3, flops=1.3e12)],
    ],
    ids=["even", "slow for the same work", "eight per cent more than the mean", "the most work, but quick"],
)
def test_is_silent_where_no_stage_is_given_too_much(rows: list[StageRow]) -> None:
    assert pipeline_imbalance.evaluate(waiting(made(rows))) is None


def test_is_silent_where_it_saves_nothing() -> None:
    nothing = Prediction(low=99e3, mid=99e3, high=100e3)
    assert pipeline_imbalance.evaluate(waiting(made(UNEVEN), balanced_step_us=nothing)) is None
