"""Accelerate's loop: prepared model, optimizer, loader and scheduler, accumulation, evaluation, a saved state."""

import argparse

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from witness import Witness

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--save", default="")
parser.add_argument("--cpu", action="store_true")
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
accelerator = Accelerator(cpu=options.cpu, gradient_accumulation_steps=options.accumulate)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
data = TensorDataset(torch.randn(32 * 64, 32), torch.randint(0, 4, (32 * 64,)))
loader = DataLoader(data, batch_size=16, shuffle=True)
held_out = DataLoader(data, batch_size=64)
model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
witness = Witness(Accelerator, torch.autograd, torch.distributed)
steps = 0
while steps < options.steps:
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        steps += 1
        witness.look()
        if steps == 4:
            model.eval()
            with torch.no_grad():
                for x, _ in held_out:
                    predicted = model(x).argmax(-1)
                    if accelerator.distributed_type != DistributedType.DEEPSPEED:  # fails there on gloo
                        accelerator.gather_for_metrics(predicted)
            model.train()
            if options.save:
                accelerator.save_state(options.save)
        if steps == options.steps:
            break
witness.report(accelerator.process_index, accelerator.num_processes, steps)
accelerator.end_training()
