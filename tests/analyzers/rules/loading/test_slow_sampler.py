"""Samplers that block the training thread: told apart from batches that workers could load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.rules.loading import slow_sampler
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.recording.metadata import DataLoaderMetadata
from perfscope.results.summary import Summary
from tests.analyzers.measured import advised
from tests.analyzers.rules.jobs import QUICK, Analyzed, changed, runs
from tests.analyzers.rules.jobs import analyze as analyzed

RANGE = "perfscope::dataloader_sampler"
STACK = "torch/utils/data/dataloader.py(733): _next_index"
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def write(folder: Path, sampled: list[int], fetched: int, computed: int, name: str = RANGE) -> None:
    """A job of one rank on a CPU: each step draws indices for so long, loads the batch and computes, in ms."""
    events: list[dict[str, Any]] = []

    def add(category: str, name: str, begin: int, took: int) -> None:
        events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": begin * 1e3, "dur": took * 1e3}
        )

    now = 0
    for number, drawing in enumerate(sampled):
        add("user_annotation", f"ProfilerStep#{number}", now, drawing + fetched + computed)
        add("user_annotation", LOADER, now, drawing + fetched)
        if drawing:
            add("python_function" if name == STACK else "user_annotation", name, now, drawing)
        add("cpu_op", "aten::mm", now + drawing + fetched, computed)
        now += drawing + fetched + computed
    folder.mkdir()
    (folder / "rank0.json").write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": 0}}))


def found(folder: Path, *times: Any, **named: Any) -> Summary:
    write(folder, *times, **named)
    return advised(folder)


def rules(summary: Summary) -> list[str]:
    return [finding.rule for finding in summary.findings]


@pytest.mark.parametrize("name", [RANGE, STACK])
def test_what_the_sampler_takes_is_told_apart(tmp_path: Path, name: str) -> None:
    summary = found(tmp_path / "t", [40] * 6, 20, 40, name=name)
    (row,) = summary.dataloader
    assert (row.wait_us, row.blocking_us) == (60_000, 60_000)
    assert (row.sampler_us, row.batch_us, row.fetching_us) == (40_000, 20_000, 20_000)
    assert rules(summary)[:2] == ["slow-sampler", "dataloader-workers"]
    sampler, workers = summary.findings[:2]
    assert sampler.title == "The data loader's sampler blocks 40% of the recorded time"
    assert sampler.ceiling == pytest.approx(100 / 60 - 1)
    assert workers.title.startswith("Data loading blocks 20% of the step")


def test_workers_leave_the_sampler_where_it_is(tmp_path: Path) -> None:
    """What one worker cannot take over is the sampler's 40 ms beside 40 ms of computing."""
    write(tmp_path / "t", [40] * 6, 20, 40)
    assert predict(context_of(tmp_path / "t"), {"dataloader.num_workers": "1"}).mid_ns == pytest.approx(80e6, rel=0.003)


def test_a_batch_that_is_slow_is_no_sampler(tmp_path: Path) -> None:
    assert rules(found(tmp_path / "t", [1] * 6, 59, 40))[0] == "dataloader-workers"
    assert "slow-sampler" not in rules(found(tmp_path / "u", [1] * 6, 59, 40))


def test_an_order_that_is_made_in_one_step_is_told_with_it(tmp_path: Path) -> None:
    summary = found(tmp_path / "t", [0, 0, 400, 0, 0, 0, 0, 0], 0, 50)
    assert rules(summary)[0] == "slow-sampler"
    assert summary.findings[0].title == "The data loader's sampler blocks 50% of the recorded time in 1 of 8 steps"
    assert summary.findings[0].confidence == "low"
    assert "dataloader-workers" not in rules(summary)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    """12 steps of 4 ranks, which load quickly."""
    return analyzed(replace(QUICK, steps=12), tmp_path_factory.mktemp("job"))


def test_an_epoch_s_order_counts_once_per_epoch(job: Analyzed) -> None:
    """40 ms in an epoch of 100 batches."""
    steps = {
        rank: replace(each, sampling_us=tuple(40_000.0 * (index == 3) for index in range(12)))
        for rank, each in job.context.per_step.items()
    }
    loader = DataLoaderMetadata(num_workers=2, batches_per_epoch=100, sampler="LengthSampler")
    context = changed(job.context, per_step=steps, runs=runs(4, loader=loader))
    finding = slow_sampler.evaluate(context)
    assert finding is not None
    step = context.step_time_us
    assert finding.ceiling == pytest.approx(step / (step - 400) - 1)
    assert finding.action.old == "LengthSampler"


def test_one_rank_s_sampler_is_not_the_job_s(job: Analyzed) -> None:
    steps = dict(job.context.per_step)
    steps[2] = replace(steps[2], sampling_us=(40_000.0,) * 12)
    assert slow_sampler.evaluate(changed(job.context, per_step=steps)) is None
