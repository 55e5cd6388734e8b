"""A training with FSDP2 on CPUs: bf16 gathers of fp32 parameters. Rank 0 prints who issued each step's gathers, as
``[["F", "F", "B", …], …]``: the forward's loop, or autograd.
"""

import argparse
import json
import sys
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

WIDTH, BLOCKS = 64, 3

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--keep", action="store_true", help="reshard_after_forward=False")
parser.add_argument("--steps", type=int, default=8)
options = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
layers = [nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)]
model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
how = {
    "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
    "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
for layer in layers:
    fully_shard(layer, reshard_after_forward=not options.keep, **how)
fully_shard(model, **how)

issued: list[str] = []
gather = param_group.foreach_all_gather


def counted(*args, **more):
    issued.append("F" if torch._C._current_graph_task_id() == -1 else "B")
    return gather(*args, **more)


param_group.foreach_all_gather = counted
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = iter(DataLoader([torch.randn(WIDTH)] * 10_000, batch_size=8))
ends = [0]
for _ in range(options.steps):
    for micro in range(options.accumulate):
        model.set_requires_gradient_sync(micro == options.accumulate - 1)
        model(next(loader)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ends.append(len(issued))
if dist.get_rank() == 0:
    sys.stdout.write(json.dumps([issued[begin:end] for begin, end in pairwise(ends)]) + "\n")
dist.barrier()
dist.destroy_process_group()
