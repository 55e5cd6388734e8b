"""Classification with timm (its model, optimizer, loss and schedule) under DDP, as its train.py does."""

import argparse

import torch
import torch.distributed as dist
from log import log
from timm import create_model
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="vit_tiny_patch16_224")
options = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
size = {"img_size": 32, "patch_size": 8, "depth": 3} if options.model.startswith("vit") else {}
model = torch.nn.parallel.DistributedDataParallel(create_model(options.model, num_classes=10, **size))
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
schedule, smooth = CosineLRScheduler(optimizer, t_initial=20), LabelSmoothingCrossEntropy(0.1)
data = torch.utils.data.TensorDataset(torch.randn(400, 3, 32, 32), torch.randint(0, 10, (400,)))
sampler = torch.utils.data.distributed.DistributedSampler(data)
for number, (image, label) in enumerate(torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)):
    optimizer.zero_grad()
    loss = smooth(model(image), label)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step_update(number)
    log(loss.item())
    if number == 19:
        break
dist.destroy_process_group()
