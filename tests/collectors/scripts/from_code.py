"""Trains with DDP and records from within: late, twice, nested, and with an exception. Prints what it knows."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

folder, records = Path(sys.argv[1]), sys.argv[2] == "record"
torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)  # gives the optimizer a step of its own
batches = iter(DataLoader(TensorDataset(torch.randn(1024, 16)), batch_size=8))


def train(steps):
    for _ in range(steps):
        loss = model(next(batches)[0]).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return loss.item()


losses, folders, said = [train(3)], [], []
if records:
    import perfscope

    options = {"wait": 1, "warmup": 1, "active": 2, "sample_every": 0.0}
    with perfscope.record(folder, **options) as outer:
        losses.append(train(4))
        with perfscope.record(folder.with_name("inner"), **options) as inner:
            losses.append(train(4))
        losses.append(train(2))  # leaving the inner one has not ended the outer
    folders += [str(outer.folder), str(inner.folder)]
    losses.append(train(2))  # recorded by nobody
    perfscope.start(folder, steps_only=True, **options)
    losses.append(train(6))
    folders.append(str(perfscope.stop()))
    try:
        with perfscope.record(folder, hang_timeout=60, **options) as failing:
            losses.append(train(6))
            raise KeyError("the user's")
    except KeyError:
        folders.append(str(failing.folder))
else:
    losses += [train(steps) for steps in (4, 4, 2, 2, 6, 6)]
sys.stdout.write(f"\nthe truth: {json.dumps({'rank': dist.get_rank(), 'losses': losses, 'folders': folders})}\n")
sys.stdout.flush()
dist.destroy_process_group()
sys.exit(7)
