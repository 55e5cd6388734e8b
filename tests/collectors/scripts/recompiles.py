"""Trains a compiled model with batches of another length in each step, so that it is compiled again for each."""

from __future__ import annotations

import torch
from torch import nn

torch._dynamo.config.recompile_limit = 64
model = torch.compile(nn.Linear(16, 16), backend="eager", dynamic=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(12):
    model(torch.ones(step + 2, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
