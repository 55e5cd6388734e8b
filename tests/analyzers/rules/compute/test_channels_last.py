"""Memory format: conversions around convolutions, by the job simulated without them."""

from __future__ import annotations

import pytest

from perfscope.analyzers.rules.compute import channels_last
from perfscope.results.findings import Obtained
from tests.analyzers.rules.jobs import QUICK, Analyzed, analyze
from tests.benchmarks.whatif_questions import TO_FIRST, TO_LAST, converting
from tests.generator import step_time_ns


def planted(folder_of: pytest.TempPathFactory, *kernels: str) -> Analyzed:
    with pytest.MonkeyPatch.context() as patch:
        converting(patch, *kernels)
        return analyze(QUICK, folder_of.mktemp("converting"))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    return planted(tmp_path_factory, TO_LAST, TO_LAST, TO_FIRST)


def test_the_prediction_is_the_step_of_the_job_without_conversions(job: Analyzed) -> None:
    (finding,) = (one for one in job.summary.findings if one.rule == channels_last.RULE)
    truth = step_time_ns(QUICK) / 1e3
    assert finding.predicted_step_us is not None
    assert finding.predicted_step_us.mid == pytest.approx(truth, rel=0.005)
    assert finding.obtained is Obtained.REPLAYED
    conversions = 3 * QUICK.model.layers
    assert finding.evidence[0].value == pytest.approx(conversions * QUICK.model.small_kernel_ns / 1e3, rel=0.01)
    assert finding.evidence[1].value == conversions
    assert "memory_format=torch.channels_last" in finding.action.how
    assert "not predicted" in (finding.action.costs or "")


def test_tensors_whose_channels_are_last_already_are_silent(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Convolutions that want them first convert the other way."""
    other = planted(tmp_path_factory, TO_FIRST, TO_FIRST, TO_LAST)
    assert other.context.conversions is None
    assert channels_last.RULE not in other.rules


def test_conversions_that_take_little_are_silent(tmp_path_factory: pytest.TempPathFactory) -> None:
    healthy = analyze(QUICK, tmp_path_factory.mktemp("healthy"))
    assert channels_last.RULE not in healthy.rules
