"""DDP on two ranks, with everything about it known to the test that runs it."""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=18)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--settle", type=float, default=0, help="seconds of the second step, for other processes")
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 4)), bucket_cap_mb=3)
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(12 * 64, 24))
loader = DataLoader(data, batch_size=12, sampler=DistributedSampler(data), num_workers=options.workers, drop_last=True)
for step, (x,) in enumerate(loader):
    if step == options.steps:
        break
    if step == 1:
        time.sleep(options.settle)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
sys.stdout.write(f"rank {dist.get_rank()} done, {os.environ.get('FROM_USERS_SITECUSTOMIZE', 'nothing')}\n")
sys.stdout.flush()
dist.destroy_process_group()
