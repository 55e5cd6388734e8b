"""A data loader: workers that load batches ahead, and a training loop that takes them in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.generator.engine import Host
from tests.generator.parts import LoaderSpec

MULTIPROCESSING = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
SINGLE_PROCESS = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


@dataclass(frozen=True)
class Delivery:
    """One call of ``__next__``: when it was called and returned, and what its batch took to load."""

    step: int
    start_ns: int
    end_ns: int
    load_ns: int


class Loader:
    """One rank's loader. Batch i is loaded by worker i mod workers, which is asked for it when batch i - workers x
    prefetch has been taken; the first ones when the loader is made."""

    def __init__(self, spec: LoaderSpec, start_ns: int, load_ns: Callable[[int], int]) -> None:
        self._spec = spec
        self._load_ns = load_ns
        self._free = [start_ns] * spec.workers
        self._ready: list[int] = []
        self.deliveries: list[Delivery] = []
        for _ in range(spec.workers * spec.prefetch):
            self._ask(start_ns)

    def _ask(self, now: int) -> None:
        batch = len(self._ready)
        worker = batch % self._spec.workers
        self._free[worker] = max(self._free[worker], now) + self._load_ns(batch)
        self._ready.append(self._free[worker])

    def next(self, host: Host) -> None:
        """The training loop takes the next batch; the process is in ``__next__`` until it has it."""
        start, batch = host.now, len(self.deliveries)
        load_ns = self._load_ns(batch)
        with host.range(
            "user_annotation", SINGLE_PROCESS if self._spec.workers == 0 else MULTIPROCESSING, "dataloader"
        ):
            host.spend(self._spec.next_ns)
            if self._spec.workers == 0:
                host.spend(load_ns)
            else:
                host.spend_until(self._ready[batch])
                self._ask(host.now)
        self.deliveries.append(Delivery(host.step, start, host.now, load_ns))
