"""Maps a function over items on any ``concurrent.futures.Executor``: a process pool, or a dask cluster (``cluster``).

What a command reads itself it reads on forked processes (``forked``) where it can, without importing this.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, InvalidStateError, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import field
from queue import Empty, SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar

from perfscope._version import __version__
from perfscope.errors import PerfscopeError, TooLittleMemory
from perfscope.execution import forked
from perfscope.execution.dask_workers import DaskWorkers
from perfscope.execution.forked import Forked
from perfscope.execution.outcome import WORKER_DIED, Item, Outcome, Result, describe
from perfscope.execution.serial import Serial
from perfscope.frozen import dataclass

_P = ParamSpec("_P")
_Returned = TypeVar("_Returned")

WORK_LOST: Final = "the executor cancelled this work: it was shut down, or its scheduler has ended; analyze again"
NO_WORKERS: Final = "the cluster has had no worker for {seconds} s; start workers and analyze again"

_PATIENCE_S: Final = 120.0
"""How long a cluster may be without a worker before its work fails: schedulers take time to start workers."""
_HELPED: Final = 4
"""Up to so many processes the caller's own is one of them; among more, handing out the work is enough for it."""
_AHEAD: Final = 2
"""Items that a worker has while the caller works too, and cannot hand out the next one."""
_STUCK_S: Final = 60.0
"""When a cluster has finished nothing for so long, what is under way is given to another worker, too."""
_WORK_OF_THREAD: Final = 2
"""What dask sends a worker's thread at once: one item to work on, one to begin with next."""
_FAILED: Final = 2
"""So many errors of one piece of work count, though another worker still has it, too: that one may be stopped."""
_POLL_S: Final = 5.0


class HelpedPool(ProcessPoolExecutor):
    """Worker processes beside which the caller's own process works, which it would else start one more for.

    That process has imported, and keeps warm, what each worker has to warm up by itself.
    """


@dataclass
class _Assignment:
    """What workers of a cluster were given to do."""

    call: Callable[[], Any]
    given: list[Future[Any]] = field(default_factory=list)
    """The workers' futures. dask drops the work of forgotten ones."""
    times: int = 0
    """How often it was given."""
    failed: int = 0


class Cluster(Executor):
    """A dask cluster.

    A worker that was stopped, or whose disk does not answer, keeps its work for minutes or for ever. So work may be
    given to several workers; the first result counts.
    """

    def __init__(self, workers: DaskWorkers, patience_s: float = _PATIENCE_S, stuck_s: float = _STUCK_S) -> None:
        self.patience_s = patience_s
        self.stuck_s = stuck_s
        self._workers = workers
        self._under_way: dict[Future[Any], _Assignment] = {}
        """What was promised -> its work."""
        self._lock = threading.Lock()

    def submit(self, fn: Callable[_P, _Returned], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_Returned]:
        """Call ``fn`` on some worker."""
        promised: Future[_Returned] = Future()
        work = functools.partial(fn, *args, **kwargs)
        with self._lock:
            assignment = self._under_way[promised] = _Assignment(work)
        self._give(promised, assignment)
        return promised

    def submit_again(self) -> None:
        """Give some of what is under way to one more worker each: as much as the workers can have at once, what was
        given to the fewest and longest ago first. A stopped worker also keeps results that nobody has fetched.
        """
        most = _WORK_OF_THREAD * self._workers.threads()
        with self._lock:
            again = sorted(self._under_way.items(), key=lambda entry: entry[1].times)[:most]
        for promised, assignment in again:
            self._give(promised, assignment)

    def _give(self, promised: Future[Any], assignment: _Assignment) -> None:
        given = self._workers.submit(assignment.call)
        with self._lock:
            if promised not in self._under_way:
                given.cancel()
                return
            assignment.times += 1
            assignment.given.append(given)
        given.add_done_callback(functools.partial(self._done, promised))

    def _done(self, promised: Future[Any], done: Future[Any]) -> None:
        """One of the workers has finished. An error counts if it is the last one's or the second one."""
        failed = done.cancelled() or done.exception() is not None
        with self._lock:
            if promised not in self._under_way:
                return
            assignment = self._under_way[promised]
            assignment.given.remove(done)
            assignment.failed += failed
            if failed and assignment.given and assignment.failed < _FAILED:
                return
            del self._under_way[promised]
        with suppress(InvalidStateError):  # given up
            if done.cancelled():
                promised.cancel()
            elif failed:
                promised.set_exception(done.exception())
            else:
                promised.set_result(done.result())

    def has_workers(self) -> bool:
        """Whether the scheduler can be reached and has a worker."""
        return self._workers.threads() > 0


@contextmanager
def cluster(scheduler: str, *, timeout_s: float = 30.0) -> Iterator[Cluster]:
    """Connect to the dask scheduler at an address such as ``tcp://host:8786``.

    Raises PerfscopeError, naming the remedy, when dask is not installed, nothing answers there, or the workers have
    another version of this package than the caller.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise PerfscopeError(
            "--scheduler needs dask.distributed: pip install 'perfscope-profiler[dask]', here and on the workers"
        ) from error
    try:
        client: Any = Client(scheduler, timeout=timeout_s, set_as_default=False)  # type: ignore[no-untyped-call, unused-ignore]
    except (OSError, ValueError, ImportError) as error:
        raise PerfscopeError(
            f"{scheduler}: no dask scheduler answers there ({describe(error)}); start one with `dask scheduler` and "
            "give the address that it prints"
        ) from error
    with client:
        _same_version_on_workers(client, scheduler)
        yield Cluster(DaskWorkers(client))


def local_pool(workers: int, *, helped: bool) -> ProcessPoolExecutor:
    """So many worker processes; where ``helped`` and they are few, the caller's own is one of them."""
    return _pool(workers - 1, HelpedPool) if helped and workers <= _HELPED else _pool(workers)


def outcomes(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    executor: Executor,
    meanwhile: Callable[[], None] | None,
    suspects: list[Item],
) -> Iterator[Outcome[Item, Result]]:
    """Outcomes as they are done, in any order.

    ``meanwhile`` is called once, in the caller's process, when every worker has something to do and the caller has
    not: beside a ``HelpedPool`` it takes items itself. ``suspects`` gets the items without an outcome: their worker
    died, or memory was too little beside others.
    """
    waiting = deque(items)
    # A pool has at most one item per worker in flight, or two: when it breaks, few items are suspects.
    width: int = getattr(executor, "_max_workers", len(items))
    kind = HelpedPool if isinstance(executor, HelpedPool) else ProcessPoolExecutor
    alone = width == 1 and kind is not HelpedPool
    own: Executor | None = None
    try:
        while waiting:
            current = own or executor
            for item, future in _until_broken(function, waiting, current, width, meanwhile):
                meanwhile = None
                if _worker_died(future) or (not alone and _lacked_memory(future)):
                    suspects.append(item)
                else:
                    yield _outcome(item, future)
            if waiting:
                if own is not None:
                    own.shutdown(wait=False)
                own = _pool(width, kind)
    finally:
        if own is not None:
            own.shutdown(wait=False, cancel_futures=True)


def _until_broken(
    function: Callable[[Item], Result],
    waiting: deque[Item],
    executor: Executor,
    width: int,
    meanwhile: Callable[[], None] | None = None,
) -> Iterator[tuple[Item, Future[Result]]]:
    """Submit everything in ``waiting``; yield done futures. When the pool breaks, it ends with items still waiting."""
    flying: dict[Future[Result], Item] = {}
    done: SimpleQueue[Future[Result]] = SimpleQueue()
    here = Serial() if isinstance(executor, HelpedPool) else None
    width *= _AHEAD if here else 1
    broken = False
    while flying or (waiting and not broken):
        while waiting and len(flying) < width and not broken:
            try:
                future = executor.submit(function, waiting[0])
            except BrokenProcessPool:
                broken = True
            else:
                flying[future] = waiting.popleft()
                future.add_done_callback(done.put)
        if here and waiting and not broken:
            item = waiting.popleft()
            yield item, here.submit(function, item)
        has_more = here is not None and bool(waiting) and not broken
        if meanwhile is not None and not has_more:
            meanwhile()
            meanwhile = None
        while flying and not (has_more and done.empty()):
            future = _next_done(done, flying, executor)
            broken = broken or _is_broken_pool(future)
            yield flying.pop(future), future
            if not has_more:
                break


def _next_done(
    done: SimpleQueue[Future[Result]], flying: Iterable[Future[Result]], executor: Executor
) -> Future[Result]:
    """Wait for a future to be done. Where no worker is left, all of them fail; stuck ones are tried elsewhere."""
    if not isinstance(executor, Cluster):
        return done.get()
    idle_s = waited_s = 0.0
    again_s = executor.stuck_s
    while True:
        with suppress(Empty):
            return done.get(timeout=_POLL_S)
        waited_s += _POLL_S
        if waited_s >= again_s:
            executor.submit_again()
            again_s = 2 * waited_s + executor.stuck_s
        idle_s = 0.0 if executor.has_workers() else idle_s + _POLL_S
        if idle_s >= executor.patience_s:
            for future in flying:
                with suppress(InvalidStateError):  # done just now
                    future.set_exception(PerfscopeError(NO_WORKERS.format(seconds=round(executor.patience_s))))


def _outcome(item: Item, future: Future[Result]) -> Outcome[Item, Result]:
    try:
        return Outcome(item, future.result(), None)
    except CancelledError:
        return Outcome(item, None, WORK_LOST)
    except Exception as error:
        return Outcome(item, None, describe(error))


def _worker_died(future: Future[Result]) -> bool:
    # dask's KilledWorker is recognised by name: importing it would need dask.
    return not future.cancelled() and (_is_broken_pool(future) or type(future.exception()).__name__ == "KilledWorker")


def _lacked_memory(future: Future[Result]) -> bool:
    return not future.cancelled() and isinstance(future.exception(), TooLittleMemory)


def _is_broken_pool(future: Future[Result]) -> bool:
    return not future.cancelled() and isinstance(future.exception(), BrokenProcessPool)


def alone(function: Callable[[Item], Result], item: Item, executor: Executor | Forked) -> Outcome[Item, Result]:
    """Try a suspect with nothing beside it: on the cluster, or in a process of its own."""
    with nullcontext(executor) if isinstance(executor, Cluster) else _pool(1) as chosen:
        ((_, future),) = _until_broken(function, deque([item]), chosen, 1)
        return Outcome(item, None, WORKER_DIED) if _worker_died(future) else _outcome(item, future)


def _pool(workers: int, kind: type[ProcessPoolExecutor] = ProcessPoolExecutor) -> ProcessPoolExecutor:
    # fork needs no importable __main__ (a notebook, a script without a guard) and is fast, but must not copy a process
    # whose other threads may hold locks.
    context = multiprocessing.get_context("fork" if forked.is_possible() else "spawn")
    return kind(workers, mp_context=context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """In a worker: exit when the parent process is gone, which cannot stop its workers when it is killed."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent watch").start()


def _same_version_on_workers(client: Any, scheduler: str) -> None:
    """Raise where a worker has another version. The ranks of workers that start later fail by themselves."""
    try:
        versions = client.run(installed_version)
    except Exception as error:
        raise PerfscopeError(
            f"{scheduler}: its workers cannot run perfscope ({describe(error)}); install it there: "
            f"pip install perfscope-profiler=={__version__}"
        ) from error
    others = sorted(f"{worker} has {version}" for worker, version in versions.items() if version != __version__)
    if others:
        raise PerfscopeError(
            f"{scheduler}: its workers must have this version, {__version__}, for the results to be the same; "
            f"{', '.join(others[:3])}"
        )


def installed_version() -> str:
    """The version of this package in the process that runs this."""
    return __version__
