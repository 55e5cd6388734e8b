"""Runs what advice asks its users to type: a text in each line of standard input; null or an error, in JSON, answers.

A process of one rank on CPUs, with what such code finds in a training script under the names that advice uses.
Frameworks are stood in for by functions that take the arguments their own take.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import tempfile
import types
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.pipelining import PipelineStage
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.analyzers.rules.arguments import ARGUMENTS


def stand_in(name: str) -> Any:
    """A function of the arguments of ``name``, and of positional ones by their order in advice."""

    def call(*positional: Any, **given: Any) -> types.SimpleNamespace:
        if unknown := set(given) - set(ARGUMENTS[name].split()):
            raise TypeError(f"{name} has no argument {sorted(unknown)}")
        return types.SimpleNamespace(**given, accumulate=lambda model: nullcontext())

    return call


def make_frameworks() -> dict[str, Any]:
    """Modules of frameworks, with stand-ins alone; what scripts have imported from them."""
    for name in ARGUMENTS:
        parts = name.split(".")
        for at in range(1, len(parts)):
            place = ".".join(parts[:at])
            sys.modules.setdefault(place, types.ModuleType(place))
        setattr(sys.modules[".".join(parts[:-1])], parts[-1], stand_in(name))
    vars(sys.modules["accelerate"])["DDPCommunicationHookType"] = types.SimpleNamespace(BF16="bf16", FP16="fp16")
    modules = (name.rpartition(".") for name in ARGUMENTS)
    return {function: getattr(sys.modules[module], function) for module, _, function in modules}


class Block(nn.Module):
    """A layer that FSDP wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        prefetched: torch.Tensor = self.linear(rows)
        return prefetched


def script(typed: str, frameworks: dict[str, Any]) -> dict[str, Any]:
    """The names that a training script has, anew for each text."""
    blocks = [Block(), Block()]
    model: nn.Module = nn.Sequential(*blocks)
    if "no_sync" in typed or "register_comm_hook" in typed:
        model = nn.parallel.DistributedDataParallel(model)
    if "_forward_module" in typed:
        model._forward_module = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    if "set_requires_gradient_sync" in typed:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    if "prefetch([" in typed:
        from torch.distributed.fsdp import fully_shard

        for block in blocks:
            fully_shard(block)
    batch = torch.ones(2, 4)
    dataset = TensorDataset(torch.ones(8, 4))
    if "p.grad" in typed:
        model(batch).sum().backward()
    loss = model(batch).sum() if "no_sync" not in typed else batch.sum()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    stage = PipelineStage(nn.Linear(4, 4), 0, 1, torch.device("cpu")) if "schedule =" in typed else None
    return {
        **frameworks,
        "torch": torch, "gc": gc, "dist": torch.distributed, "Block": Block, "blocks": blocks, "model": model,
        "batch": batch, "x": batch, "images": torch.ones(2, 3, 4, 4),
        "batches": [batch, batch], "dataset": dataset, "DataLoader": DataLoader, "loader": [batch],
        "sampler": DistributedSampler(dataset), "epochs": 1, "step": 500, "metrics": torch.ones(3),
        "flag": torch.ones(1), "tensors": [torch.ones(2)], "max_norm": 1.0, "decay": 0.99,
        "averages": [parameter.detach().clone() for parameter in model.parameters()],
        "loss": loss, "optimizer": optimizer,
        "lr": 0.1, "device": "cpu", "output_dir": "/nowhere", "stage": stage, "stages": [stage, stage],
        "loss_of": lambda model, batch: model(batch).sum(),
        "accelerator": types.SimpleNamespace(
            prepare=lambda each: each
        ),
        "fabric": types.SimpleNamespace(
            no_backward_sync=lambda model, enabled: nullcontext(), setup_dataloaders=lambda each: each,
            backward=lambda loss: loss.backward(),
        ),
        "trainer": types.SimpleNamespace(accelerator=types.SimpleNamespace(ddp_handler=None)),
        "engine": types.SimpleNamespace(compile=lambda compile_kwargs=None: None),
    }  # fmt: skip


NEEDS_A_DEVICE = "communication hook required CUDA"


def error_of(typed: str, frameworks: dict[str, Any]) -> str | None:
    """What goes wrong; None where nothing does. Devices of CUDA are CPUs here, and every mesh has one rank."""
    here = re.sub(r"\(\d+, \d+\), mesh_dim_names", "(1, 1), mesh_dim_names", typed.replace('"cuda"', '"cpu"'))
    try:
        exec(here, script(typed, frameworks))
    except Exception as error:
        if NEEDS_A_DEVICE in str(error):
            return None
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    """Make the process group; then answer until standard input ends."""
    # Without a device it would look for one.
    fsdp.FullyShardedDataParallel = partial(fsdp.FullyShardedDataParallel, device_id=torch.device("cpu"))
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    with tempfile.TemporaryDirectory() as path:
        frameworks = {**make_frameworks(), "path": path}
        for line in sys.stdin:
            sys.stdout.write(json.dumps(error_of(json.loads(line), frameworks)) + "\n")
            sys.stdout.flush()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
