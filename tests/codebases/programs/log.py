"""What each program prints after every step, as scripts of one's own do: the number, the loss and the time."""

import os
import sys
import time

import torch

STEPS = int(os.environ.get("STEPS", "20"))
"""How many a program trains."""


class Log:
    """Call it with the loss when a step has ended. One process of the job prints: ``rank`` 0."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, loss, rank: int | None = None) -> None:
        if rank is None:
            ready = torch.distributed.is_available() and torch.distributed.is_initialized()
            rank = torch.distributed.get_rank() if ready else int(os.environ.get("RANK", "0"))
        if rank == 0:
            sys.stdout.write(f"step {self.steps} loss {float(loss)!r} at {time.perf_counter():.6f}\n")
            sys.stdout.flush()
        self.steps += 1


log = Log()
