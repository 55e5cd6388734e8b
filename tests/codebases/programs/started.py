"""Ranks and workers that the program starts itself: ``spawn`` (DDP, rendezvous by file), ``notebook`` (Accelerate's
launcher, with ``trial`` after a training in the notebook's own process), ``hogwild`` (workers on one shared model, no
process group), ``subprocesses`` (two trainings of the same script, which know nothing of each other).
"""

import socket
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from log import log
from tiny import mlp


def train(model, steps: int = 20, seed: int = 0, rank: int = 0) -> None:
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(16, 256)
        optimizer.zero_grad()
        loss = (model(x) - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        log(loss.item(), rank)


def spawned(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    train(torch.nn.parallel.DistributedDataParallel(mlp()), seed=rank, rank=rank)


def in_notebook() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(mlp())
    train(model, seed=accelerator.process_index, rank=accelerator.process_index)


def worker(number: int, model) -> None:
    train(model, seed=number, rank=number)


if __name__ == "__main__":
    how = sys.argv[1]
    if how == "spawn":
        mp.spawn(spawned, args=(tempfile.mktemp(),), nprocs=2)
    elif how == "notebook":
        from accelerate import notebook_launcher

        if sys.argv[2:] == ["trial"]:
            train(mlp(), steps=12)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        notebook_launcher(in_notebook, num_processes=2, use_port=port)
    elif how == "hogwild":
        shared = mlp()
        shared.share_memory()
        mp.spawn(worker, args=(shared,), nprocs=2)
    elif how == "subprocesses":
        for each in [subprocess.Popen([sys.executable, __file__, "alone", str(number)]) for number in range(2)]:
            each.wait()
    else:
        train(mlp(), seed=int(sys.argv[2]), rank=int(sys.argv[2]))
