"""A training whose loop is inside ranges of its own, one around everything and one around each step."""

import time

import torch
from torch.profiler import record_function

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(64, 64)
with record_function("whole training"):
    for _ in range(15):
        with record_function("one step"):
            end = time.perf_counter() + 0.06
            with torch.no_grad():
                while time.perf_counter() < end:  # many events: what a range damages after its profiler is in use
                    model(data)
            optimizer.zero_grad()
            model(data).sum().backward()
            optimizer.step()
