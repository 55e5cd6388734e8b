"""Lightning's Fabric: a loop of one's own, accumulation without exchanging gradients, a checkpoint."""

import argparse

import lightning
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from witness import Witness

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", default="checkpoint.ckpt")
options = parser.parse_args()

torch.set_num_threads(1)
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision="bf16-mixed")
fabric.launch()
lightning.seed_everything(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
data = TensorDataset(torch.randn(320, 32), torch.randint(0, 4, (320,)))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8))
witness = Witness(Fabric, torch.autograd, torch.distributed)
steps = 0
for iteration, (x, y) in enumerate(loader):
    accumulating = iteration % 2 == 0
    with fabric.no_backward_sync(model, enabled=accumulating):
        fabric.backward(nn.functional.cross_entropy(model(x), y))
    if accumulating:
        continue
    witness.look()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
    if steps == 3:
        fabric.save(options.checkpoint, {"model": model})
witness.report(fabric.global_rank, fabric.world_size, steps)
