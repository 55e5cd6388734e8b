"""A small GRPO-like loop: processes that generate, and learner ranks (gloo) that update, over pipes.

Every iteration all rollout processes generate, then the learners update together; each side waits for the other. How
long each side works is given. Each process writes when it worked by its own clock, for the test to compare with.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import perfscope

WIDTH = 128


def work(seconds: float, model: torch.nn.Module) -> torch.Tensor:
    """Run the model for so long; the last output."""
    end = time.perf_counter() + seconds
    data = torch.randn(64, WIDTH)
    while True:
        out = model(data)
        if time.perf_counter() >= end:
            return out


def rollout(number: int, args: argparse.Namespace, pipes: list) -> None:
    os.environ["PERFSCOPE_ROLE"] = "rollout"
    torch.set_num_threads(1)
    torch.manual_seed(number)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
    log = []
    for _ in range(args.iterations):
        weights = pipes[number].recv()
        begin = time.time_ns()
        model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
        with torch.no_grad(), torch.profiler.record_function("generate"):
            sample = work(args.rollout, model)
        log.append((begin, time.time_ns()))
        pipes[number].send(sample.numpy())
        perfscope.step()
    Path(args.log, f"rollout-{number}.json").write_text(json.dumps(log))


def learner(rank: int, args: argparse.Namespace, pipes: list) -> None:
    os.environ.update(PERFSCOPE_ROLE="learner", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    log = []
    for _ in range(args.iterations):
        pipes[rank].send({name: value.numpy() for name, value in model.state_dict().items()})
        sample = torch.from_numpy(pipes[rank].recv())
        begin = time.time_ns()
        with torch.profiler.record_function("update"):
            with torch.no_grad():
                work(args.update, model)
            optimizer.zero_grad()
            wrapped(sample).pow(2).mean().backward()
            optimizer.step()
        log.append((begin, time.time_ns()))
    Path(args.log, f"learner-{rank}.json").write_text(json.dumps(log))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollout", type=float, default=0.08)
    parser.add_argument("--update", type=float, default=0.03)
    parser.add_argument("--iterations", type=int, default=14)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--log", required=True)
    args = parser.parse_args()
    spawn = mp.get_context("spawn")
    ends = [spawn.Pipe() for _ in range(2)]
    processes = [
        spawn.Process(target=side, args=(number, args, [pair[place] for pair in ends]))
        for place, side in enumerate((rollout, learner))
        for number in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
