"""Loader stalls now and then: epochs that begin, batches of unequal cost, and what only looks like them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.loading import dataloader_workers, loader_startup
from perfscope.recording.metadata import DataLoaderMetadata
from tests.analyzers.rules.jobs import QUICK, Analyzed, analyze, changed, runs
from tests.generator import MS, LoaderSpec, SlowLoader, step_time_ns

LONG = replace(QUICK, steps=12, loader=LoaderSpec(workers=2, load_ns=1 * MS))
STALLED = replace(LONG, causes=(SlowLoader(steps=(19,), load_ns=30 * MS),))
LOADER = DataLoaderMetadata(num_workers=2, batch_size=8, prefetch_factor=2)


@pytest.fixture(scope="module")
def stalled(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    """Batch 19 takes all ranks' workers 30 ms, the others 1 ms."""
    return analyze(STALLED, tmp_path_factory.mktemp("stalled"))


@pytest.fixture(scope="module")
def starved(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    """Every batch takes 14 ms: two workers deliver pairs, so every other step waits."""
    return analyze(replace(LONG, causes=(SlowLoader(load_ns=14 * MS),)), tmp_path_factory.mktemp("starved"))


def loaded_with(job: Analyzed, **changes: object) -> RuleContext:
    return changed(job.context, runs=runs(4, loader=replace(LOADER, **changes)))


def test_an_odd_slow_batch_asks_for_more_loaded_ahead(stalled):
    finding = loader_startup.evaluate(loaded_with(stalled, batches_per_epoch=1000))
    assert finding is not None
    assert finding.action.setting == "DataLoader(prefetch_factor=…)"
    assert finding.action.old == "2"
    assert f"prefetch_factor={finding.action.new}" in finding.action.how
    assert "more batches per rank" in finding.action.costs


def test_with_as_many_loaded_ahead_the_stall_is_gone_and_with_one_less_it_is_not(stalled):
    finding = loader_startup.evaluate(loaded_with(stalled, batches_per_epoch=1000))
    assert finding is not None
    enough = int(finding.action.new)
    # From the 10th step on, which the recording begins with, workers are as far ahead as they may be.
    steps = {
        ahead: step_time_ns(replace(STALLED, loader=replace(LONG.loader, prefetch=ahead))) / 1e3
        for ahead in (enough - 2, enough)
    }
    unstalled_us = stalled.context.step_time_us / (1 + finding.ceiling)
    assert steps[enough] == pytest.approx(unstalled_us, rel=0.02)
    assert steps[enough - 2] > 1.05 * unstalled_us


def test_more_workers_are_not_asked_for(stalled):
    assert dataloader_workers.evaluate(stalled.context) is not None, "without the loader's settings it cannot be known"
    assert dataloader_workers.evaluate(loaded_with(stalled)) is None


def test_an_epoch_that_begins_asks_for_workers_that_stay(stalled):
    (step,) = loader_startup.find_stalls(loaded_with(stalled)).steps
    context = loaded_with(stalled, batches_per_epoch=step)
    finding = loader_startup.evaluate(context)
    assert finding is not None
    assert (finding.action.setting, finding.action.new) == ("DataLoader(persistent_workers=…)", "True")
    # One stall in an epoch, however short the recording was.
    worst = max(row.value for row in finding.evidence if row.what == "longest stall")
    lost = worst / step
    assert finding.ceiling == pytest.approx(context.step_time_us / (context.step_time_us - lost) - 1)


def test_workers_that_stay_already_are_not_asked_for(stalled):
    (step,) = loader_startup.find_stalls(loaded_with(stalled)).steps
    finding = loader_startup.evaluate(loaded_with(stalled, batches_per_epoch=step, persistent_workers=True))
    assert finding is not None
    assert finding.action.setting == "DataLoader(prefetch_factor=…)"


def starting(job: Analyzed, at: dict[int, float], **loader: object) -> RuleContext:
    """The job with data loaders that start in these steps (index: µs), and wait for a batch only there."""
    steps = job.context.steps
    own = tuple(at.get(index, 0.0) for index in range(steps))
    per_step = {
        rank: replace(each, starting_us=own, loading_us=tuple(us / 2 for us in own))
        for rank, each in job.context.per_step.items()
    }
    return changed(loaded_with(job, **loader), per_step=per_step)


def test_loaders_that_are_seen_to_start_need_no_long_epoch(stalled):
    steps = stalled.context.info.steps
    context = starting(stalled, {1: 4_000.0, 5: 5_000.0, 9: 3_000.0}, batches_per_epoch=4)
    finding = loader_startup.evaluate(context)
    assert finding is not None
    assert "the data loader's workers at the start of an epoch" in finding.title
    assert (finding.action.setting, finding.action.new) == ("DataLoader(persistent_workers=…)", "True")
    assert loader_startup.find_stalls(context).steps == (steps[1], steps[5], steps[9])
    # 4 ms of starting and 2 ms of loading, every fourth step.
    lost = 6_000.0 / 4
    assert finding.ceiling == pytest.approx(context.step_time_us / (context.step_time_us - lost) - 1)


@pytest.mark.parametrize(
    ("at", "loader"),
    [
        ({1: 20_000.0, 5: 20_000.0}, {"persistent_workers": True}),
        ({1: 20_000.0, 5: 20_000.0}, {"num_workers": 0}),
        ({1: 200.0, 5: 200.0}, {}),
        ({}, {}),
    ],
    ids=["workers stay", "no workers", "quick", "none"],
)
def test_loaders_that_cost_little_to_start_or_cannot_be_helped(stalled, at, loader):
    stalls = loader_startup.find_stalls(starting(stalled, at, **loader))
    assert stalls is None or not stalls.recorded


def test_a_single_start_counts_once_in_an_epoch(stalled):
    context = starting(stalled, {2: 40_000.0}, batches_per_epoch=100)
    (loader,) = {row.batches_per_step for row in context.summary.dataloader}
    assert loader == 1
    finding = loader_startup.evaluate(context)
    assert finding is not None
    assert finding.ceiling == pytest.approx(context.step_time_us / (context.step_time_us - 60_000.0 / 100) - 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_for_each_batch_is_told_as_such(stalled, workers):
    each = dict.fromkeys(range(stalled.context.steps), 1_000.0)
    finding = loader_startup.evaluate(starting(stalled, each, batches_per_epoch=100, num_workers=workers))
    assert finding is not None
    assert "started anew in each step, before its epoch ends" in finding.title
    assert "next(batches)" in finding.action.how
    # Half a millisecond of loading comes back only where workers load ahead.
    lost = 1_500.0 if workers else 1_000.0
    step = stalled.context.step_time_us
    assert finding.ceiling == pytest.approx(step / (step - lost) - 1)


def test_epochs_of_one_batch_are_no_abandoned_iterators(stalled):
    each = dict.fromkeys(range(stalled.context.steps), 1_000.0)
    finding = loader_startup.evaluate(starting(stalled, each, batches_per_epoch=1))
    assert finding is not None
    assert finding.action.setting == "DataLoader(persistent_workers=…)"


def test_slow_loading_throughout_is_told_as_well(starved):
    context = starting(starved, {1: 20_000.0, 5: 20_000.0})
    slow = {rank: replace(each, loading_us=(7_000.0,) * 12) for rank, each in context.per_step.items()}
    stalls = loader_startup.find_stalls(changed(context, per_step=slow))
    assert stalls is not None
    assert not stalls.is_all
    assert dataloader_workers.evaluate(changed(context, per_step=slow)) is not None


def test_workers_that_are_too_slow_stall_in_rounds_and_need_company(starved):
    assert loader_startup.evaluate(loaded_with(starved)) is None
    assert dataloader_workers.evaluate(loaded_with(starved)) is not None


def test_without_workers_nothing_is_loaded_ahead(stalled):
    assert loader_startup.evaluate(loaded_with(stalled, num_workers=0)) is None
    assert loader_startup.evaluate(stalled.context) is None
