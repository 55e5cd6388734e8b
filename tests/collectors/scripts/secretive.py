"""A training whose names, settings and failures carry secrets: CANARY, in all of FORMS in each place."""

import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset

CANARY = os.environ["CANARY"]
FORMS: list[str] = json.loads(os.environ["FORMS"])


def planted(place: str) -> list[str]:
    """A secret of its own in each form."""
    return [form.replace("{}", f"{CANARY}{place}{number}") for number, form in enumerate(FORMS)]


class Samples(Dataset[torch.Tensor]):
    """Its length, which describing it asks for, is not known."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((24,), float(index % 7))

    @property
    def shape(self) -> tuple[int, ...]:
        raise RuntimeError("no access: " + ", ".join(planted("dataset")))


class Model(nn.Module):
    """Has a configuration, as those of transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 4))
        listed = {f"setting_{number}": text for number, text in enumerate(planted("config"))}
        self.config = {"hub_token": CANARY, "nested": {"values": planted("nested")}, **listed}

    def __len__(self) -> int:
        raise RuntimeError(" and ".join(planted("model")))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


torch.set_num_threads(1)
dist.init_process_group("gloo")
named = [dist.new_group([0, 1], group_desc=text) for text in planted("group")]
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters())
for x in DataLoader(Samples(), batch_size=12, num_workers=1):
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    for text in planted("range"):
        with record_function(f"fetch {text}"):
            loss.detach().sum()
    for group in named:
        dist.all_reduce(loss.detach().clone(), group=group)
    optimizer.step()
dist.destroy_process_group()
raise RuntimeError("upload failed: " + "\n".join(planted("raised")))
