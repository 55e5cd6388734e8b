"""Draws from loaders of every kind; prints what each delivered and what its workers say of it, as JSON by kind."""

import json
import sys
import time

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, get_worker_info

from perfscope.collectors.phases.workers import Workers

SLEEP_S = 0.004


class Slow(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        time.sleep(SLEEP_S)
        return torch.full((2,), float(index))


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for index in range(info.id, 12, info.num_workers):
            time.sleep(SLEEP_S)
            yield torch.full((2,), float(index))


def seeded(worker):
    torch.manual_seed(worker)


KINDS = {
    "fork": {"multiprocessing_context": "fork"},
    "spawn": {"multiprocessing_context": "spawn"},
    "forkserver": {"multiprocessing_context": "forkserver"},
    "persistent": {"persistent_workers": True},
    "initialized": {"worker_init_fn": seeded},
    "sampled by batches": {"batch_size": 1, "batch_sampler": BatchSampler(SequentialSampler(range(12)), 2, False)},
    "samples": {"batch_size": None},
    "one ahead": {"prefetch_factor": 1},
}


ONE_EPOCH = ("spawn", "forkserver")
"""Of the other kinds two: the workers of these import torch anew in each."""


def drawn(loader, epochs=2):
    """The first number of every batch, and what the workers fetched since the first look at them."""
    numbers, batches, fetch_ns = [], 0, 0
    for _ in range(epochs):
        iterator = iter(loader)
        workers = Workers(tuple(worker.pid for worker in iterator._workers))
        for batch in iterator:
            numbers.append(batch.flatten()[0].item())
            worked = workers.look()
            if worked is not None:
                batches += worked.batches
                fetch_ns += worked.fetch_ns
    return numbers, batches, fetch_ns


def main():
    found = {
        kind: drawn(
            DataLoader(Slow(), **{"batch_size": 2, "num_workers": 2, **options}), epochs=1 if kind in ONE_EPOCH else 2
        )
        for kind, options in KINDS.items()
    }
    found["stream"] = drawn(DataLoader(Stream(), batch_size=2, num_workers=2))
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        pass
    else:
        found["stateful"] = drawn(StatefulDataLoader(Slow(), batch_size=2, num_workers=2))
        found["stateful stream"] = drawn(StatefulDataLoader(Stream(), batch_size=2, num_workers=2))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
