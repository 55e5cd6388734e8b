"""Trains a model of nearly nothing, and prints how many bytecodes of the collector run in one of its steps."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SETTLED, COUNTED = 600, 40


model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
batches = iter(DataLoader(TensorDataset(torch.ones(SETTLED + COUNTED, 1))))
codes: Counter[str] = Counter()


def step() -> int:
    """The bytecodes that ran in it."""
    before, (x,) = codes.total(), next(batches)
    model(x).backward()
    optimizer.step()
    return codes.total() - before


def traced(frame: FrameType, _event: str, _argument: object) -> Callable[..., Any] | None:
    """Count those of the collector's functions alone."""
    if "collectors" not in frame.f_code.co_filename:
        return None
    frame.f_trace_opcodes, frame.f_trace_lines = True, False
    return count


def count(_frame: FrameType, event: str, _argument: object) -> Callable[..., Any]:
    codes[event] += event == "opcode"
    return count


for _ in range(SETTLED):
    step()
sys.settrace(traced)
counted = sorted(step() for _ in range(COUNTED))
sys.settrace(None)
sys.stdout.write(f"{counted[COUNTED // 2]}\n")
