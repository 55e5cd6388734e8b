"""What is recorded of data loaders: epochs that samplers are told, and whether ranks are given the same samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from perfscope.collectors.loaders import CHECKED_BYTES, FINGERPRINTS, LoaderUses, fingerprint, first_shape
from perfscope.metadata import DataLoaderRecord

DATA = TensorDataset(torch.arange(48, dtype=torch.float32).reshape(24, 2))


def drawn(loader: DataLoader[Any], epochs: int = 1, sampler: DistributedSampler[Any] | None = None) -> DataLoaderRecord:
    """What is recorded after so many epochs; ``sampler`` is told each of them."""
    uses = LoaderUses()
    for epoch in range(epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        iterator = iter(loader)
        for batch in iterator:
            uses.drew(iterator, batch)
    (record,) = uses.records()
    return record


def divided(rank: int, epochs: int = 1, *, told: bool = False, shuffle: bool = True) -> DataLoaderRecord:
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, num_replicas=2, rank=rank, shuffle=shuffle)
    return drawn(DataLoader(DATA, batch_size=3, sampler=sampler), epochs, sampler if told else None)


def test_a_sampler_that_is_never_told_the_epoch_stays_at_0():
    record = divided(0, epochs=3)
    assert (record.batches, record.batches_per_epoch) == (12, 4)
    assert (record.shuffle, record.sampler_epoch) == (True, 0)


def test_one_that_is_told_has_the_last():
    assert divided(0, epochs=3, told=True).sampler_epoch == 2


def test_one_that_does_not_shuffle_says_so():
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
        assert first_shape(batch) == (8, 8)
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
