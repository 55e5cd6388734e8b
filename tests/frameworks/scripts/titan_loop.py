"""torchtitan's way without torchtitan: one device mesh, tensor parallel in each block, FSDP2 across."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from witness import Witness

STEPS = 10

torch.set_num_threads(1)
torch.manual_seed(0)
world = int(os.environ["WORLD_SIZE"])
mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp_shard", "tp"))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(32) for _ in range(2)])
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Net()
for block in model.blocks:
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp_shard"])
fully_shard(model, mesh=mesh["dp_shard"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
witness = Witness(torch.autograd, dist)
steps = 0
for _ in range(STEPS):
    for _ in range(2):  # accumulation
        loss = nn.functional.cross_entropy(model(torch.randn(8, 32)), torch.randint(0, 4, (8,)))
        (loss / 2).backward()
    witness.look()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
    if steps == 4:
        model.eval()
        with torch.no_grad():
            model(torch.randn(8, 32))
        model.train()
witness.report(dist.get_rank(), dist.get_world_size(), steps)
dist.destroy_process_group()
