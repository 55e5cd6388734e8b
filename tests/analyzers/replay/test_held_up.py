"""Ranks that workers hold up now and then, of which one has a slow host that costs nothing beside that."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfscope.results.summary import Summary
from tests.analyzers.measured import advised
from tests.emulator.draw import draw
from tests.emulator.emulate import emulate

SEED = 18112
"""Four ranks whose workers deliver four batches at a time, and take longer for them than the training: three steps hold
two such waits. The host of rank 1 takes 3.6 times as long for operators, behind a busy device."""


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    folder: Path = tmp_path_factory.mktemp("held-up")
    emulate(draw(SEED).job).write(folder)
    return advised(folder)


def test_no_host_is_charged_with_what_the_workers_of_all_ranks_cause(summary: Summary) -> None:
    step_us = summary.job.step_time_us
    assert all(row.lost_us < 0.05 * step_us for row in summary.stragglers if row.cause != "dataloader")


def test_the_loaders_are_the_headline(summary: Summary) -> None:
    assert summary.verdict.headline.startswith("Data loading blocks")
    assert summary.findings[0].rule == "dataloader-workers"
