"""Sampling: orders that repeat, and ranks that are given the same samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.loading import sampler
from perfscope.recording.metadata import CaptureMetadata, DataLoaderMetadata
from perfscope.results.findings import Severity
from perfscope.results.tables import GroupRow
from tests.analyzers.rules.jobs import breakdown, context, runs

DIVIDED = DataLoaderMetadata(
    sampler="DistributedSampler", shuffle=True, sampler_epoch=0, batches_per_epoch=10, batches=8, fingerprints=(1, 2, 3)
)
SHUFFLED = DataLoaderMetadata(sampler="RandomSampler", batches=8, fingerprints=(7, 8, 9))


def job(loader: DataLoaderMetadata, last_step: int = 20, own: bool = True, **others: object) -> RuleContext:
    """Two ranks whose capture of 8 steps ended with ``last_step``; with samples of their ``own`` or the same ones."""
    recorded = {}
    for rank, run in runs(2, loader=loader).items():
        capture = CaptureMetadata(file="", first_step=last_step - 7, last_step=last_step)
        marks = tuple(mark + 100 * rank * own for mark in loader.fingerprints)
        recorded[rank] = replace(run, captures=(capture,), dataloaders=(replace(loader, fingerprints=marks),))
    return context(breakdown(0), breakdown(1), runs=recorded, **others)


def test_an_epoch_that_is_never_set_is_reported_as_such():
    finding = sampler.evaluate(job(DIVIDED))
    assert finding is not None
    assert "every epoch repeats the order of the first" in finding.title
    assert finding.severity is Severity.INFO
    assert finding.ceiling is None
    assert "sampler.set_epoch(epoch)" in finding.action.how
    assert finding.evidence[0].value == pytest.approx(2.0)
    assert finding.evidence[0].ranks == (0, 1)


def test_a_stream_is_divided_by_itself():
    """DistributedSampler takes no iterable dataset."""
    finding = sampler.evaluate(job(replace(DIVIDED, iterable=True, sampler="_InfiniteConstantSampler"), own=False))
    assert finding is not None
    assert finding.action.setting == "IterableDataset.__iter__"
    assert "get_worker_info" in finding.action.how
    assert "Sampler" not in f"{finding.action.old} {finding.action.new} {finding.action.how}"


@pytest.mark.parametrize(
    ("changes", "last_step"),
    [
        ({}, 12),
        ({"sampler_epoch": 1}, 20),
        ({"shuffle": False}, 20),
        ({"batches": 4}, 20),
        ({"batches_per_epoch": None}, 20),
    ],
    ids=["first epoch", "epoch set", "not shuffled", "a batch in every other step", "stream"],
)
def test_silent_where_it_may_be_right(changes, last_step):
    assert sampler.evaluate(job(replace(DIVIDED, **changes), last_step)) is None


def test_the_same_samples_on_every_rank():
    finding = sampler.evaluate(job(SHUFFLED, own=False))
    assert finding is not None
    assert "All 2 ranks get the same samples" in finding.title
    assert finding.action.new == "DistributedSampler"
    assert "DistributedSampler(dataset, shuffle=True)" in finding.action.how


def test_equal_batches_of_a_sampler_that_divides_are_of_equal_seeds():
    finding = sampler.evaluate(job(replace(DIVIDED, sampler_epoch=3), own=False))
    assert finding is not None
    assert finding.title == "DistributedSampler divides the samples, yet batches begin alike on all ranks"
    assert "torch.manual_seed" in finding.action.how
    assert "DistributedSampler(" not in finding.action.how


def test_samples_of_their_own_are_silent():
    assert sampler.evaluate(job(SHUFFLED)) is None


def test_made_up_batches_that_never_change_are_silent():
    assert sampler.evaluate(job(replace(SHUFFLED, fingerprints=(7, 7, 7)), own=False)) is None


def test_one_batch_alone_proves_nothing():
    assert sampler.evaluate(job(replace(SHUFFLED, fingerprints=(7,)), own=False)) is None


def test_ranks_that_share_a_layer_have_to_share_samples():
    group = GroupRow(name="1", ranks=(0, 1), role="tensor", role_from="test", comm_us=1.0, across_hosts=False)
    assert sampler.evaluate(job(SHUFFLED, own=False, groups=(group,))) is None
    assert sampler.evaluate(job(SHUFFLED, own=False, strategy=("fsdp", "tensor"))) is None
