"""Ranks that the script starts itself; with ``trial`` after a training of its own, as in a notebook.

With ``trial in-range`` a range that began in the trial is open when they are started.
"""

import sys
from contextlib import ExitStack

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.profiler import record_function


def train(model: nn.Module, steps: int, ranges: ExitStack | None = None) -> None:
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        if ranges is not None and step == 4:
            ranges.enter_context(record_function("sweep"))
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()


def rank_of_two(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    train(nn.parallel.DistributedDataParallel(nn.Linear(8, 8)), 4)
    dist.destroy_process_group()


if __name__ == "__main__":
    with ExitStack() as ranges:
        if "trial" in sys.argv:
            train(nn.Linear(8, 8), 6, ranges if "in-range" in sys.argv else None)
        mp.start_processes(rank_of_two, args=(sys.argv[1],), nprocs=2, start_method=sys.argv[2])
