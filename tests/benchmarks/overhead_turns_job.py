"""The training that ``overhead_turns.py`` starts several of: some steps each time it is told to."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WARM = 320
"""Steps before the first turn: by then the models have been looked for, the run has been described, and what recording
costs has been measured, as for nearly all steps of a training."""


class Model(nn.Module):
    """A transformer in a class of the script's own, as models are."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Encode."""
        encoded: torch.Tensor = self.encoder(x)
        return encoded


def main() -> None:
    """Answer each line with the wall and CPU times (ns) of so many steps; an empty one ends the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--modules", action="store_true", help="import some of the standard library")
    options = parser.parse_args()
    if options.modules:
        for name in ("asyncio", "email.mime.text", "http.server", "sqlite3", "unittest.mock", "xml.dom.minidom"):
            importlib.import_module(name)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # all of them share one core
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: Any = Model(options.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = DataLoader(TensorDataset(torch.randn(4096, 32, 64)), batch_size=8, drop_last=True)
    batches = itertools.chain.from_iterable(itertools.repeat(data))

    def step() -> None:
        (x,) = next(batches)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    for _ in range(WARM):
        step()
    while line := sys.stdin.readline().strip():
        took = []
        for _ in range(int(line)):
            wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
            step()
            took.append((time.perf_counter_ns() - wall, time.thread_time_ns() - cpu))
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main()
