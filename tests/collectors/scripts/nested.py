"""A training that starts another training in a process of its own, which takes itself for rank 0 as well."""

import subprocess
import sys

import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    if step == 2 and len(sys.argv) == 1:
        subprocess.run([sys.executable, __file__, "inner"], check=True)
