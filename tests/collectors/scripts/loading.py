"""A training that takes its time: two loader workers that compute, until the file that is named is there."""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return torch.full((8,), float(index))


if __name__ == "__main__":
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in DataLoader(Slow(), batch_size=2, num_workers=2):
        if Path(sys.argv[1]).is_file():
            break
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
