"""DeepSpeed's example of its engine: ``deepspeed.initialize``, ZeRO by its JSON."""

import argparse

import deepspeed
import torch
from log import STEPS, log
from tiny import mlp

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--stage", type=int, default=2)
parser.add_argument("--bucket", type=int, default=500_000_000, help="elements in a reduction")
options = parser.parse_args()
deepspeed.init_distributed("gloo")
settings = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": options.stage, "reduce_bucket_size": options.bucket},
}
model = mlp()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
torch.manual_seed(engine.global_rank)
for _ in range(STEPS):
    x = torch.randn(8, 256)
    loss = (engine(x) - x).pow(2).mean()
    engine.backward(loss)
    engine.step()
    log(loss.item())
