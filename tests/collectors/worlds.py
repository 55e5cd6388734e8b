"""A process group of many ranks in one process, for what needs no communication."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def world(size: int, rank: int = 0) -> Iterator[None]:
    """This process as ``rank`` of ``size``, on torch's own stand-in for a backend."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Written:
    """Stands in for the annotator: the names of the ranges in order of their beginning, and whether all were closed."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.open = 0

    def begin(self, name: str) -> str:
        self.names.append(name)
        self.open += 1
        return name

    def end(self, record: str) -> None:
        self.open -= 1
