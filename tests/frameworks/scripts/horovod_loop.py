"""Horovod's loop: gradients averaged in the background, accumulated over two passes, weights broadcast first."""

import horovod.torch
import horovod.torch.optimizer
import torch
from torch import nn
from witness import Witness

STEPS = 10

hvd = horovod.torch
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(hvd.rank())
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=2, op=hvd.Average
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
witness = Witness(hvd, horovod.torch.optimizer, torch.autograd)
steps = 0
for _ in range(STEPS):
    for _ in range(2):
        loss = nn.functional.cross_entropy(model(torch.randn(8, 32)), torch.randint(0, 4, (8,)))
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
    hvd.allreduce(loss.detach(), name="loss")
    witness.look()
witness.report(hvd.rank(), hvd.size(), steps)
