"""A DataLoader with worker processes: each is a program of its own that loads what the training asked it for."""

from __future__ import annotations

from tests.emulator.chance import normal
from tests.emulator.machine import Waits
from tests.emulator.rank import Rank


class Batches:
    """One rank's loader. Worker ``k % workers`` loads batch ``k``; batches are handed over in their order. As torch's
    ``_try_put_index`` does, ``prefetch`` batches per worker are asked for at first, and one more for each handed over.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._loader = rank.job.loader
        self._per_step = rank.job.microbatches if rank.job.stages == 1 else 1
        self._drawn = 0
        self._asked = 0
        self._free = [rank.now] * max(self._loader.workers, 1)
        self._ready: list[int] = []
        self._took: list[int] = []
        self._recorded_from: int | None = None
        """The end of the first recorded draw."""
        for _ in range(self._loader.workers * self._loader.prefetch):
            self._ask()

    def _load_ns(self, batch: int) -> float:
        rank, loader = self._rank, self._loader
        jitter = max(0.2, 1 + loader.jitter * normal(rank.job.seed, rank.number, batch, "load"))
        return loader.load_ns * jitter * rank.job.factor("slow loader", rank.number) / self._per_step

    def _ask(self) -> None:
        """The worker whose turn it is begins when it is free and has been asked."""
        worker = self._asked % self._loader.workers
        self._took.append(round(self._load_ns(self._asked)))
        self._free[worker] = max(self._free[worker], self._rank.now) + self._took[-1]
        self._ready.append(self._free[worker])
        self._asked += 1

    def draw(self) -> Waits:
        """``next(iterator)`` and the copy to the device."""
        rank, loader = self._rank, self._loader
        kind = "_MultiProcessingDataLoaderIter" if loader.workers else "_SingleProcessDataLoaderIter"
        with rank.range("dataloader"), rank.annotation(f"enumerate(DataLoader)#{kind}.__next__"):
            if loader.workers:
                rank.now = max(rank.now, self._ready[self._drawn])
                rank.spend(loader.fetch_ns)
                self._ask()
            else:
                rank.idle(self._load_ns(self._drawn))
        self._drawn += 1
        if rank.recording:
            self._count()
        with rank.operator("aten::to"), rank.operator("aten::_to_copy"), rank.operator("aten::copy_"):
            rank.spend(rank.job.cpu.operator_ns)
            yield from rank.copy("HtoD", loader.batch_bytes // self._per_step, blocking=not loader.pinned)

    def _count(self) -> None:
        """What a profiled rank asks its workers for after every draw."""
        begin, end = self._recorded_from, self._rank.now
        self._recorded_from = end if begin is None else begin
        done = zip(self._ready, self._took, strict=True)
        self._rank.fetched = [took for ready, took in done if self._recorded_from < ready <= end]
