"""Maps a function over ranks: the only module that knows that work may run elsewhere.

It knows executors, not traces. The executor is any ``concurrent.futures.Executor``: ``Serial`` here, a process pool, or
``dask.distributed``'s ``client.get_executor(pure=False)``.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_P = ParamSpec("_P")

WORKER_DIED = (
    "the worker process died while reading it (killed, most likely for memory); analyze it on a larger machine"
)


@dataclass(frozen=True)
class Outcome(Generic[Item, Result]):
    """What became of one item: a result, or the error that cost it. Never both, never neither."""

    item: Item
    result: Result | None
    error: str | None


class Serial(Executor):
    """Runs every call at once, in the caller's own process."""

    def submit(self, fn: Callable[_P, Result], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[Result]:
        """Call ``fn`` now; the future that comes back is done."""
        future: Future[Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def default_executor(items: int, total_bytes: int) -> Executor:
    """A process pool sized to the cores, or ``Serial`` where starting one costs more than it saves."""
    workers = min(items, available_cores())
    # Starting workers takes about as long as reading this much; measured with tests/benchmarks.
    small = 4 << 20
    return _pool(workers) if workers > 1 and total_bytes > small else Serial()


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_items(
    function: Callable[[Item], Result], items: Sequence[Item], executor: Executor
) -> Iterator[Outcome[Item, Result]]:
    """Call ``function`` on every item; yield outcomes as they are done, in any order, exactly one an item.

    An exception costs its item only. A worker that dies breaks a process pool for all items in flight: each of those is
    then tried once more in a process of its own, so that only the one that kills its worker is lost.
    """
    futures: dict[Future[Result], Item] = {}
    broken: list[Item] = []
    for item in items:
        try:
            futures[executor.submit(function, item)] = item
        except BrokenProcessPool:
            broken.append(item)
    for future in as_completed(futures):
        item = futures.pop(future)
        try:
            yield Outcome(item, future.result(), None)
        except BrokenProcessPool:
            broken.append(item)
        except Exception as error:
            yield Outcome(item, None, describe(error))
    for item in broken:
        yield _alone(function, item)


def describe(error: Exception) -> str:
    """An error in one line: its message, with the type where the message alone would puzzle."""
    text = str(error)
    return text if type(error).__module__.startswith("perfscope") else f"{type(error).__name__}: {text}"


def _alone(function: Callable[[Item], Result], item: Item) -> Outcome[Item, Result]:
    with _pool(1) as pool:
        try:
            return Outcome(item, pool.submit(function, item).result(), None)
        except BrokenProcessPool:
            return Outcome(item, None, WORKER_DIED)
        except Exception as error:
            return Outcome(item, None, describe(error))


def _pool(workers: int) -> ProcessPoolExecutor:
    # fork needs no importable __main__ (a notebook, a script without a guard) and starts at once, but must not copy a
    # process whose other threads may hold locks.
    forkable = "fork" in multiprocessing.get_all_start_methods() and threading.active_count() == 1
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork" if forkable else "spawn"))
