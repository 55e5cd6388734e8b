"""A training whose names, settings and failures carry secrets: all that it is given as CANARY, in many forms."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset

CANARY = os.environ["CANARY"]


class Samples(Dataset[torch.Tensor]):
    """Its length, which describing it asks for, is not known."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((24,), float(index % 7))

    @property
    def shape(self) -> tuple[int, ...]:
        raise RuntimeError(f"no access with token={CANARY} to https://me:{CANARY}@host/data")


class Model(nn.Module):
    """Has a configuration, as those of transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 4))
        self.config = {"hub_token": CANARY, "url": f"https://hooks.slack.com/services/T/B/{CANARY}"}

    def __len__(self) -> int:
        raise RuntimeError(f"hf_{CANARY}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


torch.set_num_threads(1)
dist.init_process_group("gloo")
named = dist.new_group([0, 1], group_desc=f"s3://me:{CANARY}@bucket/{dist.get_world_size()}")
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters())
for x in DataLoader(Samples(), batch_size=12, num_workers=1):
    with record_function(f"fetch https://me:{CANARY}@host/x"):
        loss = model(x).pow(2).mean()
    with record_function(f"push hf_{CANARY}"):
        optimizer.zero_grad()
    with record_function(f"sign https://bucket/key?X-Amz-Signature={CANARY}&x=1"):
        loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach().clone(), group=named)
dist.destroy_process_group()
raise RuntimeError(f"upload failed: Authorization: Bearer {CANARY}, ghp_{CANARY}, sk-{CANARY}")
