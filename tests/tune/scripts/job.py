"""A data-parallel training for ``perfscope tune`` to try things on: plain user code that knows nothing of it."""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument("--load-ms", type=float, default=0.0, help="a batch takes so long to load, asleep")
parser.add_argument("--compute-ms", type=float, default=0.0, help="a step takes so much longer, asleep")
parser.add_argument("--bucket-mb", type=float, default=0.05, help="of DDP; all gradients together are 0.4 MiB")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--uneven", action="store_true", help="every third step has a micro-batch less")
parser.add_argument("--losses", type=Path, help="folder for each rank's losses and its last parameters")
parser.add_argument("--checkpoint", type=Path, help="written when the training ends, in whichever way")
options = parser.parse_args()


class Samples(Dataset[Tensor]):
    """Each one is a batch."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(options.load_ms / 1e3)
        return torch.sin(torch.arange(16 * 64, dtype=torch.float32).reshape(16, 64) * (1 + index % 97))


torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
layers = (nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64))
model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=options.bucket_mb)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
samples = Samples()
loader = DataLoader(samples, batch_size=None, sampler=DistributedSampler(samples, shuffle=True, seed=1))
batches = iter(loader)
losses = []
try:
    for step in range(options.steps):
        for _ in range(options.accumulate - (options.uneven and step % 3 == 2)):
            loss = (model(next(batches)) - 0.5).square().mean()
            (loss / options.accumulate).backward()
            losses.append(loss.item())
        time.sleep(options.compute_ms / 1e3)
        optimizer.step()
        optimizer.zero_grad()
finally:
    if options.checkpoint and rank == 0:
        options.checkpoint.write_text(json.dumps({"steps": len(losses)}), encoding="utf-8")
if options.losses:
    parameters = torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()
    result = json.dumps({"losses": losses, "parameters": parameters})
    (options.losses / f"rank-{rank}.json").write_text(result, encoding="utf-8")
dist.barrier()
dist.destroy_process_group()
