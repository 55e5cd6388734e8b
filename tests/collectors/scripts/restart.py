"""DDP whose rank 1 fails in the first attempt, after a few steps: ``restart.py STORE``."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
first = attempt == "0"
# After a restart the launcher's store still holds addresses of before, and gloo sometimes connects to these.
place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}-{attempt}", **place)
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    if first and step == 6 and dist.get_rank() == 1:
        sys.exit(3)
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
