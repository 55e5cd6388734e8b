"""Maps a function over items, here, on processes of this machine or on a cluster.

It knows nothing of traces. Results do not depend on where the work runs: in the caller's process (``serial``), on
processes forked beside it (``forked``), or on any ``concurrent.futures.Executor``, such as a dask cluster's
(``executors``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from perfscope.execution import forked
from perfscope.execution.forked import Forked
from perfscope.execution.machine import available_cores, available_memory, memory_limit
from perfscope.execution.outcome import Item, Outcome, Result, attempt
from perfscope.execution.serial import Serial

if TYPE_CHECKING:
    from concurrent.futures import Executor

_SERIAL_BELOW: Final = 4 << 20
"""Starting workers takes about as long as reading this many bytes of traces."""
_MEMORY_SHARE: Final = 0.8
"""Of the memory available at the start; the rest is for the caller, who holds every rank's result."""
_HELPER_BYTES: Final = 256 << 20
"""The caller takes no part in work of which an item needs more memory: what the system ends for it must not be the
caller."""


def local_executor(
    memory_bytes: Sequence[int], input_bytes: int, workers: int | None = None, *, helped: bool = False
) -> Executor | Forked:
    """Processes for the cores and the memory there are, or ``Serial`` where starting one costs more than it saves.

    ``memory_bytes`` is what each item is expected to need at its peak, ``input_bytes`` what all of them read together.
    ``workers`` overrides the choice; 1 is ``Serial``. Where ``helped`` and the items are small, the caller's own
    process may be one of them.
    """
    if workers is not None:
        workers = min(workers, len(memory_bytes))
        if workers <= 1:
            return Serial()
    elif len(memory_bytes) < 2 or input_bytes <= _SERIAL_BELOW:
        return Serial()
    else:
        # One worker is worth its start too: if it is killed for memory, the job goes on.
        workers = _workers_that_fit(memory_bytes)
    helped = helped and workers > 1 and max(memory_bytes) <= _HELPER_BYTES
    if helped and forked.is_possible():
        return Forked(workers - 1)
    from perfscope.execution import executors

    return executors.local_pool(workers, helped=helped)


def map_items(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    executor: Executor | Forked,
    meanwhile: Callable[[], None] | None = None,
) -> Iterator[Outcome[Item, Result]]:
    """Call ``function`` on every item; yield outcomes as they are done, in any order, exactly one per item.

    ``meanwhile`` is called once, in the caller's process, when others have something to do and the caller can spare the
    time.

    An exception costs its item only. When a worker dies, the items in flight are suspects: each is tried once
    more by itself after all others, so that only the one that kills its worker is lost. So is an item for which there
    was too little memory beside others.
    """
    if isinstance(executor, Serial):
        if meanwhile is not None:
            meanwhile()
        yield from (attempt(function, item) for item in items)
        return
    suspects: list[Item] = []
    if isinstance(executor, Forked):
        yield from executor.outcomes(function, items, meanwhile, suspects)
        if not suspects:
            return
    from perfscope.execution import executors

    if not isinstance(executor, Forked):
        yield from executors.outcomes(function, items, executor, meanwhile, suspects)
    for item in suspects:
        yield executors.alone(function, item, executor)


def _workers_that_fit(memory_bytes: Sequence[int]) -> int:
    """As many workers as there are cores, as long as the largest items fit into memory side by side."""
    limit = memory_limit()
    budget = available_memory() * _MEMORY_SHARE
    budget = budget if limit is None else min(budget, limit)
    largest = sorted(memory_bytes, reverse=True)[: available_cores()]
    total = 0.0
    for fitting, needed in enumerate(largest):
        total += needed
        if total > budget:
            return max(fitting, 1)
    return len(largest)
