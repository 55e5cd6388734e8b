"""Ray Train with two workers: decorated, or told by the variable PERFSCOPE in their environment."""

import sys

import ray
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

import perfscope

folder, how = sys.argv[1], sys.argv[2]


def train_loop(_config=None):
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


environment = {"OMP_NUM_THREADS": "1"}
if how == "variable":
    environment["PERFSCOPE"] = f"{folder} --wait 1 --warmup 1 --active 3"
else:
    train_loop = perfscope.record(folder, wait=1, warmup=1, active=3)(train_loop)
ray.init(num_cpus=3, include_dashboard=False, runtime_env={"env_vars": environment})
TorchTrainer(train_loop, scaling_config=ScalingConfig(num_workers=2)).fit()
