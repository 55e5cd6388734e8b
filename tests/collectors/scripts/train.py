"""A tiny training on one process, with options for everything that makes a loop unusual."""

import argparse
import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=14)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--critic", type=int, default=0, help="steps of a second optimizer per step of the first")
parser.add_argument("--overflow-at", type=int, default=-1)
parser.add_argument("--crash-at", type=int, default=-1)
parser.add_argument("--kill-at", type=int, default=-1)
parser.add_argument("--explicit", type=int, default=0, help="call perfscope.step() after every that many iterations")
parser.add_argument("--profile", type=int, nargs=2, default=None, help="iterations with the script's own profiler")
parser.add_argument("--compiled-step", action="store_true")
parser.add_argument("--fault", default="", help="a method of the collector to break, as module:Class.method")
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 4))

    def forward(self, x):
        return self.body(x)


if options.fault:
    import importlib

    module, _, path = options.fault.partition(":")
    owner = importlib.import_module(module)
    *classes, method = path.split(".")
    for name in classes:
        owner = getattr(owner, name)

    def broken(*args, **kwargs):
        raise RuntimeError("injected")

    setattr(owner, method, broken)


def patched():
    """Every attribute that the collector replaces while it records, in its owner's own namespace."""
    from torch.utils.data import dataloader

    owners = {
        "autograd": torch.autograd,
        "loader": dataloader._BaseDataLoaderIter,
        "distributed": torch.distributed,
        "profiler": torch.autograd.profiler,
    }
    return {
        (name, key): id(value)
        for name, owner in owners.items()
        for key, value in vars(owner).items()
        if callable(value)
    }


model = Tiny()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
critic = nn.Linear(32, 1)
critic_optimizer = torch.optim.Adam(critic.parameters())
if options.compiled_step:
    optimizer.step = torch.compile(optimizer.step, backend="eager")
scaler = torch.amp.GradScaler("cpu", enabled=options.overflow_at >= 0)
data = TensorDataset(torch.randn(64 * 8, 32))
batches = iter(DataLoader(data, batch_size=8, num_workers=options.workers))
before = patched()
changed_during = set()
own = None
if options.profile:
    own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

for iteration in range(options.steps):
    if iteration == options.crash_at:
        raise RuntimeError("the training crashed")
    if iteration == options.kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    if own is not None and iteration == options.profile[0]:
        own.start()
    if options.critic and (iteration + 1) % (options.critic + 1):
        (x,) = next(batches)
        critic(x).sum().backward()
        critic_optimizer.step()
        continue
    optimizer.zero_grad()
    for _ in range(options.accumulate):
        (x,) = next(batches)
        loss = model(x).pow(2).mean()
        if iteration == options.overflow_at:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if own is not None and iteration == options.profile[1]:
        own.stop()
        products = sum(event.name == "aten::addmm" for event in own.events())
        sys.stdout.write(f"own profiler: {products} addmm\n")
    if options.explicit and (iteration + 1) % options.explicit == 0:
        import perfscope

        perfscope.step()
    changed_during |= {key for key, value in patched().items() if before.get(key) != value}

changed_after = {key for key, value in patched().items() if before.get(key) != value}
hooks = sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())
sys.stdout.write(f"patched during: {len(changed_during)} after: {sorted(changed_after)} hooks: {hooks}\n")
words = sys.stdin.read().split()
sys.stdout.write(f"loss: {loss.item():.6f} arguments: {sys.argv[1:]} stdin: {words}\n")
