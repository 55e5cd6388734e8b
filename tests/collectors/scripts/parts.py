"""Trains a model that is called as a whole, or (``parts``) one that is never called itself; prints how many modules are
hooked in the end.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

STEPS = 40

model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for _ in range(STEPS):
    x = torch.ones(256, 64)
    if "parts" in sys.argv:
        for layer in model:
            x = layer(x)
    else:
        x = model(x)
    x.sum().backward()
    optimizer.step()
sys.stdout.write(f"{sum(bool(each._forward_hooks) for each in model.modules())}\n")
