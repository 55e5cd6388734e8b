"""Trains for epochs of four batches, with a data loader that starts its workers for each of them; with ``anew`` as its
argument, with an iterator for each batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def batches(anew: bool) -> Iterator[torch.Tensor]:
    """Twenty-four of them."""
    loader = DataLoader(TensorDataset(torch.ones(32, 16)), batch_size=8, num_workers=2)
    for _epoch in range(6):
        if anew:
            for _batch in range(4):
                yield next(iter(loader))[0]
        else:
            yield from (x for (x,) in loader)


if __name__ == "__main__":
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in batches("anew" in sys.argv):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
