"""Ray Train: its TorchTrainer with two workers."""

import sys
from pathlib import Path

import ray
import ray.train.torch
from ray.train import ScalingConfig

HERE = str(Path(__file__).parent)


def loop(config):
    sys.path.insert(0, HERE)
    import torch
    from log import log
    from tiny import mlp

    model = ray.train.torch.prepare_model(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(20):
        x = torch.randn(16, 256)
        optimizer.zero_grad()
        loss = (model(x) - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        log(loss.item())


ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True, object_store_memory=100 * 2**20)
ray.train.torch.TorchTrainer(
    loop, scaling_config=ScalingConfig(num_workers=2), torch_config=ray.train.torch.TorchConfig(backend="gloo")
).fit()
