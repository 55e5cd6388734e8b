"""What recording costs the training: step times with and without, in turn, and what a rank's start takes longer.

``python -m tests.benchmarks.overhead [--ranks 2] [--layers 4] [--rounds 300]``. Every round goes through all contenders
(``overhead_job.py``) in one process, so each ratio is of blocks seconds apart; the ratio of ``bare again`` to ``bare``
shows how much of a difference is noise. Intervals are of the median, by order statistics. CPU time is the training
thread's own; it misses waiting, but other work on the machine is not in it either.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

PERFSCOPE: Final = (sys.executable, "-c", "from perfscope.cli.main import main; main()")
BASELINE: Final = {"waiting": "bare", "bare again": "bare", "always-on": "bare", "recording": "by hand"}
"""Contender -> what it is compared with."""

START: Final = """
import json, time
import torch, torch._dynamo
from torch import nn
model = nn.Linear(4, 4)
began = time.process_time()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
made = time.process_time()
x = torch.ones(1, 4)
for step in range(8):
    model(x).sum().backward()
    optimizer.step()
print(json.dumps({"make": made - began, "steps": time.process_time() - made}))
"""
"""A process's first steps: what the collector does at its start it does in these, but for starting the interpreter.
Torch's first optimizer imports the compiler, which is none of ours and so comes before."""


WHOLE: Final = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
data = torch.utils.data.TensorDataset(torch.randn(8 * int(sys.argv[1]), 32, 64))
for x, in torch.utils.data.DataLoader(data, batch_size=8):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
"""A training from its start to its end, with as many steps as it is told."""


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, and the order statistics between which it lies with 95 % confidence (normal approximation)."""
    ordered = sorted(values)
    half = 0.98 * math.sqrt(len(ordered))
    low = max(0, math.floor(len(ordered) / 2 - half))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + half))
    return median(ordered), ordered[low], ordered[high]


def measure(ranks: int, layers: int, steps: int, rounds: int) -> dict[str, Any]:
    """Run the job; what it measured."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch, "blocks.json")
        launcher = [sys.executable]
        if ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        job = ["-m", "tests.benchmarks.overhead_job", str(output), "--layers", str(layers)]
        job += ["--steps", str(steps), "--rounds", str(rounds)]
        never = ["--wait", "1000000000"]  # captures are asked for by the job
        subprocess.run(
            [*PERFSCOPE, "run", "--output", str(Path(scratch, "recording")), *never, "--", *launcher, *job],
            check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(output.read_text())
        return found


def table(blocks: dict[str, list[list[list[int]]]]) -> list[str]:
    """A row for each contender: its step, and its ratio to what it is compared with, wall and CPU time.

    A block stands for its least step: other work on the machine only ever adds.
    """
    of_block = {
        name: [[min(sample[clock] for sample in block) for block in turns] for clock in (0, 1)]
        for name, turns in blocks.items()
    }
    rows = ["| | step, wall ms | step, CPU ms | against | wall ratio | CPU ratio |", "|---|---|---|---|---|---|"]
    for name, clocks in of_block.items():
        wall, cpu = (f"{median(clock) / 1e6:.2f}" for clock in clocks)
        base = BASELINE.get(name)
        if base is None:
            rows.append(f"| {name} | {wall} | {cpu} | | | |")
            continue
        ratios = []
        for clock in (0, 1):
            paired = [mine / its for mine, its in zip(clocks[clock], of_block[base][clock], strict=True)]
            middle, low, high = interval(paired)
            ratios.append(f"{middle:.4f} ({low:.4f} to {high:.4f})")
        rows.append(f"| {name} | {wall} | {cpu} | {base} | {' | '.join(ratios)} |")
    return rows


def small_steps(small_us: dict[str, list[float]]) -> list[str]:
    """What a whole step that computes next to nothing takes longer, from blocks in turn: other work on the machine, by
    which the same instructions take up to several times as long, is in both sides of a difference alike.
    """
    bare = small_us["bare"]
    lines = [
        f"CPU time of a whole step that computes next to nothing: {min(bare):.1f} µs bare (least), of which longer:"
    ]
    for name in ("waiting", "always-on"):
        more = [mine - its for mine, its in zip(small_us[name], bare, strict=True)]
        middle, low, high = interval(more)
        least = min(small_us[name]) - min(bare)
        lines.append(f"  {name}: {least:.1f} µs (least of each), median of {middle:.1f} ({low:.1f} to {high:.1f}) µs")
    return lines


def start_ms(options: Sequence[str] | None, scratch: Path) -> dict[str, float]:
    """CPU time of a new process, ms: starting an interpreter, making the first optimizer, the first steps.

    Bare where there are no options. Compiled Python files are stored in ``scratch``, as in any installation.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(scratch / "compiled")}
    folder = scratch / "recording"
    prefix = [*PERFSCOPE, "run", "--output", str(folder), "--overwrite", "--no-sampler", *(options or ()), "--"]
    command = [sys.executable, "-c", START]
    done = subprocess.run(
        command if options is None else [*prefix, *command],
        check=True, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    took: dict[str, float] = json.loads(done.stdout)
    if options is not None:
        environment["PYTHONPATH"] = str(folder / ".bootstrap")
    before = os.times()
    subprocess.run([sys.executable, "-c", ""], check=True, env=environment)
    after = os.times()
    start = after.children_user - before.children_user + after.children_system - before.children_system
    return {"start": 1e3 * start, **{name: 1e3 * value for name, value in took.items()}}


def start_table(rounds: int) -> list[str]:
    """What a rank's start takes longer, in turn with bare ones."""
    modes: dict[str, Sequence[str] | None] = {
        "bare": None, "planned captures": ("--wait", "1000"), "--steps-only": ("--steps-only",),
    }  # fmt: skip
    found: dict[str, list[dict[str, float]]] = {name: [] for name in modes}
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(rounds + 1):  # the first compiles
            for name, options in modes.items():
                took = start_ms(options, Path(scratch))
                if turn:
                    found[name].append(took)
    rows = ["| | interpreter | first optimizer | first eight steps | more than bare |", "|---|---|---|---|---|"]
    sums = {}
    for name, runs in found.items():
        parts = [median(run[part] for run in runs) for part in ("start", "make", "steps")]
        sums[name] = sum(parts)
        shown = " | ".join(f"{part:.0f}" for part in parts)
        rows.append(f"| {name} | {shown} | {sums[name] - sums['bare']:.0f} |")
    return rows


def whole_s(options: Sequence[str] | None, steps: int, scratch: Path) -> float:
    """CPU time of a training from its start to its end, s, all processes of the command; bare without options."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(scratch / "compiled")}
    command = [sys.executable, "-c", WHOLE, str(steps)]
    if options is not None:
        command = [*PERFSCOPE, "run", "--output", str(scratch / "whole"), "--overwrite", *options, "--", *command]
    before = os.times()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def whole_table(rounds: int, steps: int) -> list[str]:
    """What a whole training of so many steps takes longer, in turn with bare ones."""
    modes: dict[str, Sequence[str]] = {
        "default: one capture of 8 steps": (), "--steps-only": ("--steps-only",),
        "--steps-only, no samples": ("--steps-only", "--no-sampler"),
    }  # fmt: skip
    bare: list[float] = []
    more: dict[str, list[float]] = {name: [] for name in modes}
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(rounds + 1):  # the first compiles
            without = whole_s(None, steps, Path(scratch))
            took = {name: whole_s(options, steps, Path(scratch)) for name, options in modes.items()}
            if turn:
                bare.append(without)
                for name, seconds in took.items():
                    more[name].append(seconds - without)
    rows = ["| | CPU s | share of bare |", "|---|---|---|", f"| bare | {median(bare):.2f} | |"]
    for name, values in more.items():
        rows.append(f"| {name} | +{median(values):.2f} | {median(values) / median(bare):.1%} |")
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="processes that train together")
    parser.add_argument("--layers", type=int, default=4, help="of the transformer: some 4 ms per step each")
    parser.add_argument("--steps", type=int, default=10, help="in a block")
    parser.add_argument("--rounds", type=int, default=300, help="blocks of each contender, a fifth with a profiler")
    parser.add_argument("--starts", type=int, default=7, help="processes started of each kind")
    parser.add_argument("--whole", type=int, default=0, help="only compare whole trainings of so many steps")
    options = parser.parse_args(arguments)
    if options.whole:
        print(f"Whole trainings of {options.whole} steps, from start to end, {options.starts} of each kind\n")
        print("\n".join(whole_table(options.starts, options.whole)))
        return
    found = measure(options.ranks, options.layers, options.steps, options.rounds)
    print(f"{options.rounds} rounds, blocks of {options.steps} steps, {options.ranks} rank(s)\n")
    print("\n".join(table(found["blocks"])))
    torch_us, ours_us = (min(found["alone_us"][name]) for name in ("torch", "perfscope"))
    print(f"\nCPU time of an optimizer's step that does nothing, least of many: {torch_us:.1f} µs bare,")
    print(f"{ours_us:.1f} µs as a training step under perfscope run, so {ours_us - torch_us:.1f} µs per step.\n")
    print("\n".join(small_steps(found["small_us"])) + "\n")
    print("CPU time of a rank's start, ms:\n")
    print("\n".join(start_table(options.starts)))


if __name__ == "__main__":
    main()
