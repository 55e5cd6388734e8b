"""A DataLoader with worker processes: each is a program of its own that loads what the training asked it for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tests.emulator.chance import normal
from tests.emulator.machine import Waits
from tests.emulator.rank import COMPUTE, COPIES, Rank
from tests.emulator.spec import Job


@dataclass
class Queue:
    """What a rank's workers have in hand, ns against the rank's clock: when each worker is free, and when each batch
    that was asked for and not taken is there."""

    free: list[int]
    ready: deque[int] = field(default_factory=deque)


def batches_per_step(job: Job) -> int:
    """That a rank draws."""
    return job.microbatches if job.stages == 1 else 1


def load_ns(job: Job, rank: int, batch: int) -> float:
    """What one batch takes a worker, or the host where there is none."""
    jitter = max(0.2, 1 + job.loader.jitter * normal(job.seed, rank, batch, "load"))
    return job.loader.load_ns * jitter * job.factor("slow loader", rank) / batches_per_step(job)


def queues(job: Job, step_ns: float) -> list[Queue]:
    """Each rank's after ``job.age`` steps that take ``step_ns`` without waits for batches. All ranks go on when the
    last of them has its batch; batches before the first emulated one have negative numbers."""
    workers, per_step = job.loader.workers, batches_per_step(job)
    found = [Queue([0] * workers) for _ in range(job.ranks)]
    ahead, first = workers * job.loader.prefetch, -job.age * per_step

    def ask(rank: int, batch: int, now: int) -> None:
        queue, worker = found[rank], batch % workers
        queue.free[worker] = max(queue.free[worker], now) + round(load_ns(job, rank, batch))
        queue.ready.append(queue.free[worker])

    for rank in range(job.ranks):
        for batch in range(first, first + ahead):
            ask(rank, batch, 0)
    now = 0
    for batch in range(first, 0):
        taken = [max(now, queue.ready.popleft()) for queue in found]
        for rank, at in enumerate(taken):
            ask(rank, batch + ahead, at)
        now = max(taken) + round(step_ns / per_step)
    return [Queue([ns - now for ns in each.free], deque(ns - now for ns in each.ready)) for each in found]


class Batches:
    """One rank's loader. Worker ``k % workers`` loads batch ``k``; batches are handed over in their order. As torch's
    ``_try_put_index`` does, ``prefetch`` batches per worker are asked for at first, and one more for each handed over.
    ``queue`` is what the workers have in hand where the loop has been running.
    """

    def __init__(self, rank: Rank, queue: Queue | None = None) -> None:
        self._rank = rank
        self._loader = rank.job.loader
        self._per_step = batches_per_step(rank.job)
        self._drawn = 0
        self._asked = 0
        self._free = [rank.now] * max(self._loader.workers, 1)
        self._ready: list[int] = []
        self._took: list[int] = []
        self._recorded_from: int | None = None
        """The end of the first recorded draw."""
        if queue is None:
            for _ in range(self._loader.workers * self._loader.prefetch):
                self._ask()
            return
        self._free = [rank.now + ns for ns in queue.free]
        self._ready = [rank.now + ns for ns in queue.ready]
        self._asked = len(self._ready)
        self._took = [round(self._load_ns(batch)) for batch in range(self._asked)]

    def _load_ns(self, batch: int) -> float:
        return load_ns(self._rank.job, self._rank.number, batch)

    def _ask(self) -> None:
        """The worker whose turn it is begins when it is free and has been asked."""
        worker = self._asked % self._loader.workers
        self._took.append(round(self._load_ns(self._asked)))
        self._free[worker] = max(self._free[worker], self._rank.now) + self._took[-1]
        self._ready.append(self._free[worker])
        self._asked += 1

    def draw(self) -> Waits:
        """The next batch on the device."""
        if not self._loader.ahead:
            yield from self._take(COMPUTE)
            return
        if not self._drawn:
            yield from self._take(COPIES)
        self._rank.depend(self._rank.last(COPIES))
        yield from self._take(COPIES)

    def _take(self, stream: int) -> Waits:
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
            yield from rank.copy(
                "HtoD", loader.batch_bytes // self._per_step, blocking=not loader.pinned, stream=stream
            )

    def _count(self) -> None:
        """What a profiled rank asks its workers for after every draw."""
        begin, end = self._recorded_from, self._rank.now
        self._recorded_from = end if begin is None else begin
        done = zip(self._ready, self._took, strict=True)
        self._rank.fetched = [took for ready, took in done if self._recorded_from < ready <= end]
