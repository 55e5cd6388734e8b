"""What is recorded of data loaders: epochs set on samplers, and whether ranks are given the same samples."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from perfscope.collectors.phases.loaders import CHECKED_BYTES, FINGERPRINTS, UsedLoaders, fingerprint
from perfscope.recording.metadata import DataLoaderMetadata

DATA = TensorDataset(torch.arange(48, dtype=torch.float32).reshape(24, 2))


def draw(uses: UsedLoaders, iterator: Any) -> Any:
    """A batch, its draw timed."""
    uses.draw_begins()
    try:
        return next(iterator)
    finally:
        uses.draw_ended()


def drawn(
    loader: DataLoader[Any], epochs: int = 1, sampler: DistributedSampler[Any] | None = None
) -> DataLoaderMetadata:
    """What is recorded after so many epochs; ``sampler.set_epoch`` is called with each."""
    uses = UsedLoaders()
    for epoch in range(epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        iterator = iter(loader)
        with suppress(StopIteration):
            while True:
                uses.drew(iterator, draw(uses, iterator))
    (record,) = uses.records()
    return record


def divided(rank: int, epochs: int = 1, *, set_epoch: bool = False, shuffle: bool = True) -> DataLoaderMetadata:
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, num_replicas=2, rank=rank, shuffle=shuffle)
    return drawn(DataLoader(DATA, batch_size=3, sampler=sampler), epochs, sampler if set_epoch else None)


def test_a_sampler_whose_epoch_is_never_set_stays_at_0():
    record = divided(0, epochs=3)
    assert (record.batches, record.batches_per_epoch) == (12, 4)
    assert (record.shuffle, record.sampler_epoch) == (True, 0)


def test_one_whose_epoch_is_set_has_the_last():
    assert divided(0, epochs=3, set_epoch=True).sampler_epoch == 2


def test_one_that_does_not_shuffle_is_recorded_as_such():
    assert divided(0, shuffle=False).shuffle is False


def test_ranks_with_samples_of_their_own_differ_and_ranks_without_do_not():
    assert not set(divided(0).fingerprints) & set(divided(1).fingerprints)
    same = [drawn(DataLoader(DATA, batch_size=3)).fingerprints for _ in range(2)]
    assert same[0] == same[1]
    assert len(set(same[0])) == FINGERPRINTS


def test_other_samplers_and_streams_have_no_epoch():
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            return iter(torch.ones(6, 2))

    record = drawn(DataLoader(Stream(), batch_size=3))
    assert (record.batches_per_epoch, record.shuffle, record.sampler_epoch) == (None, None, None)
    assert drawn(DataLoader(DATA, batch_size=5)).batches_per_epoch == 5


def test_no_operator_of_torch_reads_the_batch():
    batch = {"x": torch.ones(8, 8, dtype=torch.bfloat16)}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert fingerprint(batch) is not None
    assert not [event.name for event in profile.events() if event.name.startswith("aten::")]


def test_only_the_beginning_counts():
    one = torch.zeros(CHECKED_BYTES, dtype=torch.uint8)
    other = torch.cat((one, torch.ones(1, dtype=torch.uint8)))
    assert fingerprint(one) == fingerprint(other)
    assert fingerprint(one) != fingerprint(one[:-1])


@pytest.mark.parametrize(
    "batch",
    [
        None,
        ["text", 3],
        torch.ones(0),
        torch.ones(4, 4).t(),
        torch.ones(4, device="meta"),
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["nothing", "no tensor", "empty", "not in one piece", "elsewhere", "sparse", "another class"],
)
def test_what_cannot_be_read_as_it_lies_is_left_alone(batch):
    assert fingerprint(batch) is None


def test_memory_that_was_given_away_is_not_read():
    batch = torch.ones(4)
    batch.untyped_storage().resize_(0)
    assert fingerprint(batch) is None
    shorter = torch.ones(8)
    shorter.untyped_storage().resize_(8)
    assert fingerprint(shorter) is None


def test_a_loader_without_a_length_is_described_all_the_same():
    class Unknown(Dataset[torch.Tensor]):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.ones(2)

    sampler = iter(range(6))
    record = drawn(DataLoader(Unknown(), batch_size=3, sampler=sampler))  # type: ignore[arg-type]
    assert record.batches_per_epoch is None


def test_batches_of_different_lengths_are_counted_while_a_capture_runs():
    uses = UsedLoaders()
    iterator = iter(DataLoader(DATA, batch_sampler=[[0], [1, 2, 3], [4, 5]]))
    uses.drew(iterator, next(iterator))  # not timed: no capture runs
    for _ in range(2):
        uses.drew(iterator, draw(uses, iterator))
    (record,) = uses.records()
    assert (record.batches, record.seen_batches, record.seen_samples, record.seen_positions) == (3, 2, 5, 10)


def test_the_lengths_of_the_samples_of_batches_are_counted():
    uses = UsedLoaders()
    lengths = [torch.zeros(2, 10), torch.zeros(2, 30), torch.zeros(1, 5)]
    iterator = iter(DataLoader(lengths, batch_size=None, sampler=[0, 1, 2]))  # type: ignore[arg-type]
    for _ in range(3):
        uses.drew(iterator, draw(uses, iterator))
    (record,) = uses.records()
    assert (record.seen_samples, record.seen_positions) == (5, 20 + 60 + 5)


def test_the_loader_that_the_training_draws_from_comes_first():
    """A check of one batch before the training, then an evaluation of 8 batches beside 4 of the training."""
    checked, trained = (iter(DataLoader(DATA, batch_size=size)) for size in (2, 6))
    uses = UsedLoaders()
    uses.drew(checked, draw(uses, checked))
    uses.forward_begins(training=False)
    for _ in range(4):
        uses.drew(trained, draw(uses, trained))
        uses.forward_begins(training=True)
    for _ in range(7):
        uses.drew(checked, draw(uses, checked))
        uses.forward_begins(training=False)
    assert [(record.batch_size, record.batches) for record in uses.records()] == [(6, 4), (2, 8)]
    assert uses.batch_shape == (6, 2)


def test_loaders_are_in_the_order_of_their_first_batches_where_no_forward_is_seen():
    first, second = (iter(DataLoader(DATA, batch_size=size)) for size in (2, 6))
    uses = UsedLoaders()
    for iterator in (first, second, second):
        uses.drew(iterator, draw(uses, iterator))
    assert [record.batch_size for record in uses.records()] == [2, 6]
    assert uses.batch_shape == (2, 2)


class Costly(Dataset[torch.Tensor]):
    """Samples that take a while, awake or asleep."""

    def __init__(self, compute_s: float, sleep_s: float) -> None:
        self.compute_s = compute_s
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sleep_s)
        until = time.thread_time() + self.compute_s
        while time.thread_time() < until:
            pass
        return torch.ones(2)


def timed(dataset: Dataset[Any], uses: UsedLoaders | None = None, **options: Any) -> DataLoaderMetadata:
    uses = uses or UsedLoaders()
    iterator = iter(DataLoader(dataset, batch_size=None, **options))
    while True:
        try:
            uses.drew(iterator, draw(uses, iterator))
        except StopIteration:
            return uses.records()[-1]


def test_loading_that_computes_is_distinguished_from_loading_that_waits():
    computes, waits = timed(Costly(0.01, 0.0)), timed(Costly(0.0, 0.01))
    assert (computes.timed_batches, waits.timed_batches) == (6, 6)
    assert computes.load_cpu_ns >= 60e6
    assert computes.load_process_cpu_ns > 0.95 * computes.load_cpu_ns, "this thread is one of the process"
    assert waits.load_ns >= 60e6
    assert waits.load_cpu_ns < 0.3 * waits.load_ns


@pytest.mark.skipif(sys.platform != "linux", reason="processes' clocks are the kernel's of Linux")
def test_workers_are_asked_for_their_cpu_time():
    record = timed(Costly(0.02, 0.0), num_workers=1, prefetch_factor=1)
    # Of the first batch nothing is known: the worker may have begun long before.
    assert record.timed_batches == 5
    assert record.load_cpu_ns >= 3 * 20e6
    assert record.load_process_cpu_ns < record.load_cpu_ns


def test_what_workers_do_while_nothing_is_recorded_does_not_count():
    uses = UsedLoaders()
    loader = DataLoader(Costly(0.0, 0.0), batch_size=None, num_workers=1)
    iterator = iter(loader)
    for _ in range(2):
        uses.drew(iterator, draw(uses, iterator))
    before = uses.records()[0]
    uses.pause()
    uses.drew(iterator, draw(uses, iterator))
    assert uses.records()[0].timed_batches == before.timed_batches == 1
    assert uses.records()[0].batches == 3


def test_a_batch_that_was_not_timed_is_counted_all_the_same():
    uses = UsedLoaders()
    iterator = iter(DataLoader(DATA, batch_size=3))
    for batch in iterator:
        uses.drew(iterator, batch)
    (record,) = uses.records()
    assert (record.batches, record.timed_batches, record.load_ns, record.fingerprints) == (8, 0, 0, ())
    assert uses.batch_shape == (3, 2)


def test_a_worker_that_has_ended_breaks_nothing(monkeypatch):
    monkeypatch.setattr("perfscope.collectors.cpu.of_processes", lambda pids: None)
    record = timed(Costly(0.0, 0.0), num_workers=1)
    assert (record.batches, record.timed_batches) == (6, 0)


def test_looking_at_the_clocks_costs_next_to_nothing():
    uses = UsedLoaders()
    began = time.thread_time()
    for _ in range(2000):
        uses.draw_begins()
        uses.draw_ended()
    assert (time.thread_time() - began) / 2000 < 100e-6
