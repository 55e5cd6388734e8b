"""A small DDP training in which one rank comes to a standstill after a few steps, in the way that is asked for.

Where the culprit stands is marked ``# HERE``; the ranks of a group that waits for it get no further than ``# WAIT``.
"""

import argparse
import logging
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STUCK_AT = 3
NEVER = 10_000


class Samples(Dataset):
    """Random samples; after some of them a worker may wait for a lock that nobody gives back."""

    def __init__(self, deadlock: bool) -> None:
        self.deadlock = deadlock
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return NEVER

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.deadlock and index >= 4 * STUCK_AT:
            self.lock.acquire()
        return torch.full((8,), float(index))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--rank", type=int, default=1, help="the culprit")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kind = options.kind
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    guilty = rank == options.rank
    if kind == "setup":
        prepare(guilty)
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(
        Samples(kind == "dataloader" and guilty), batch_size=4, num_workers=int(kind == "dataloader" and guilty)
    )
    for step, batch in enumerate(loader):  # HERE dataloader
        loss = model(batch).pow(2).mean()
        optimizer.zero_grad()
        if step == STUCK_AT and guilty:
            misbehave(kind)
        loss.backward()
        report(loss, kind, guilty and step == STUCK_AT)
        optimizer.step()


def prepare(guilty: bool) -> None:
    """The others wait before the first step."""
    if guilty:
        time.sleep(NEVER)  # HERE setup
    dist.barrier()


def misbehave(kind: str) -> None:
    """What one rank does on its own."""
    if kind == "sleep":
        time.sleep(NEVER)  # HERE sleep
    elif kind == "loop":
        total = 0
        while True:
            total += 1  # HERE loop
    elif kind == "lock":
        lock = threading.Lock()
        keeper = threading.Thread(target=keep, args=(lock,), daemon=True)
        keeper.start()
        keeper.join(1)
        with lock:  # HERE lock
            pass
    elif kind == "exception":
        threading.Thread(target=time.sleep, args=(NEVER,)).start()  # keeps the process, as a logger's thread may
        raise RuntimeError("loss is not a number")  # HERE exception


def keep(lock: threading.Lock) -> None:
    """Take a lock and do not give it back."""
    with lock:
        time.sleep(NEVER)


def report(loss: torch.Tensor, kind: str, guilty: bool) -> None:
    """Exchange the loss, and more."""
    mean = loss.detach().clone()
    total = torch.zeros(3)
    if kind == "order" and guilty:
        dist.broadcast(total, 0)  # HERE order
        dist.all_reduce(mean)
        return
    if kind == "skip" and guilty:
        logging.info("no report from this rank")
    elif kind == "shape" and guilty:
        dist.all_reduce(mean.repeat(2))  # HERE shape
    else:
        dist.all_reduce(mean)  # WAIT
    dist.broadcast(total, 0)  # HERE skip
    if kind == "message":
        pass_on(guilty)


def pass_on(guilty: bool) -> None:
    """Each rank sends to the next; the guilty one forgets to."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.recv(torch.zeros(4), rank - 1)
    if rank + 1 < size and not guilty:
        dist.send(torch.ones(4), rank + 1)
    dist.barrier()  # HERE message


if __name__ == "__main__":
    sys.exit(main())
