"""A loop that uses no framework; prints which of them were imported all the same."""

import sys

import torch

FRAMEWORKS = ("accelerate", "deepspeed", "horovod", "lightning", "megatron", "pytorch_lightning", "transformers")

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(8):
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
imported = sorted({name.partition(".")[0] for name in sys.modules} & set(FRAMEWORKS))
sys.stdout.write(" ".join(["imported:", *imported]) + "\n")
