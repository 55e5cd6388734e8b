"""A training whose steps take as long as the test asks; on one process or several, and ending in many ways."""

import argparse
import atexit
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--ms", type=float, default=5, help="of compute per step")
parser.add_argument("--load-ms", type=float, default=0)
parser.add_argument("--slow-at", type=int, default=-1, help="step that takes longer")
parser.add_argument("--slow-factor", type=float, default=10, help="so many times as long")
parser.add_argument("--slow-rank", type=int, default=0, help="rank with the slow step, or with the longer loading")
parser.add_argument("--end", default="", help="how to end, on the slow rank: exit, raise, hang, kill, term, full")
parser.add_argument("--end-at", type=int, default=-1)
parser.add_argument("--end-after", nargs="*", default=(), help="files that are waited for in that step, before the end")
parser.add_argument("--first-attempt-only", action="store_true", help="end in that way before an elastic restart alone")
parser.add_argument("--timeout", type=float, default=60, help="of collectives, in seconds")
parser.add_argument("--store", default="", help="a file for the ranks to meet in, instead of the launcher's store")
parser.add_argument("--until", default="", help="a file: train until it is there")
parser.add_argument("--own-signal", action="store_true", help="handle SIGUSR2 ourselves")
options = parser.parse_args()

torch.set_num_threads(1)


def named():
    """Every function that the collector might replace, by owner and name; and the hooks of the model."""
    from torch.utils.data import dataloader

    owners = [torch.autograd, dataloader._BaseDataLoaderIter, dist, torch.autograd.profiler, nn.Module]
    functions = {
        (str(owner), name): value for owner in owners for name, value in vars(owner).items() if callable(value)
    }
    hooks = [len(each._forward_hooks) + len(each._forward_pre_hooks) for model in models for each in model.modules()]
    return functions, hooks


def report():
    """Last of all, because it was registered first: what is not as it was."""
    (functions, _hooks), (now, hooks_now) = before, named()
    changed = sorted(name for (_, name), value in now.items() if functions.get((_, name)) is not value)
    sys.stdout.write(f"rank {rank} left behind: {changed} {[n for n in hooks_now if n]}\n")
    sys.stdout.flush()


models = []
before = named()
# Replaced until the first optimizer is made: a program without one is found by its backward passes.
before[0][str(torch.autograd), "_engine_run_backward"] = torch.autograd.graph._engine_run_backward
atexit.register(report)
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
slow = rank == options.slow_rank
if world > 1:
    # After a restart the launcher's store still holds addresses of before, and gloo sometimes connects to these.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    where = {"init_method": f"file://{options.store}-{attempt}", "rank": rank, "world_size": world}
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout), **(where if options.store else {}))
if options.own_signal:
    signal.signal(signal.SIGUSR2, lambda *_: sys.stdout.write("the script's own handler ran\n"))


class Samples(Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        time.sleep(options.load_ms / 1000 if slow else 0)
        return torch.ones(8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        time.sleep(options.ms / 1000 * (options.slow_factor if slow and step == options.slow_at else 1))
        return self.layer(x)


def is_over():
    """Has the last step been taken? With a file to train until, rank 0 says after which one, before any rank can take
    the next: ranks that end after different steps would wait for each other, and fail.
    """
    if not options.until:
        return step == options.steps
    last = Path(f"{options.until}.step")
    if rank == 0 and Path(options.until).is_file() and not last.exists():
        written = last.with_suffix(".partial")
        written.write_text(str(step + 1))
        written.replace(last)
    return last.exists() and step >= int(last.read_text())


def end():
    while not all(Path(name).is_file() for name in options.end_after):
        time.sleep(0.02)
    sys.stdout.write(f"rank {rank} ends in step {step}\n")
    sys.stdout.flush()
    match options.end:
        case "exit":
            os._exit(3)
        case "raise":
            raise RuntimeError("the training crashed")
        case "hang":
            time.sleep(600)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "term":
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(600)
        case "full":
            fill()


def fill():
    """Write into the file that is named in FILL until nothing more fits."""
    with Path(os.environ["FILL"]).open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            sys.stdout.write("the disk is full\n")


model = Model()
models.append(model)
if world > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
step = 0
sys.stdout.write(f"rank {rank} pid {os.getpid()}\n")
sys.stdout.flush()
for x in DataLoader(Samples(), batch_size=1):
    if is_over():
        break
    if slow and step == options.end_at and not (options.first_attempt_only and restarted):
        end()
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
sys.stdout.write(f"rank {rank} done after {step} steps\n")
sys.stdout.flush()
if world > 1:
    dist.destroy_process_group()
