"""Every rank's analysis, wherever it is to be had: from the cache, from this machine's workers, from a cluster."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from perfscope import engine, remote
from perfscope.analyzers import cached
from perfscope.analyzers.rank import RankPartial
from perfscope.cache import Cache
from perfscope.captures import TraceSource
from perfscope.custom_flops import CustomFlops

RankOutcome = engine.Outcome[TraceSource, RankPartial]
Progress = Callable[[int, int], None]
"""Called with (files done, files in all) after each."""

_WORKER_BYTES: Final = 100 << 20
"""Resident memory of a worker that has read nothing."""
_MEMORY_PER_BYTE: Final = 0.8
"""Peak memory per byte of unpacked trace; 0.5 to 0.65 was measured."""
_PACKED: Final = (".gz", ".zip", ".zst", ".nsys-rep", ".qdrep")
_PACKING: Final = 25
"""Times that a packed trace grows when unpacked; 14 to 21 was measured."""


def gather(
    sources: Sequence[TraceSource],
    executor: Executor | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    flops: CustomFlops | None = None,
) -> list[RankOutcome]:
    """Analyze every source on ``executor``, or on ``workers`` of this machine (None: as many as cores and memory hold).

    ``flops`` are the user's own formulas. What the cache knows is not sent to workers. Exactly one outcome for each
    source, in any order.
    """
    use_cache = Cache.from_environment() is not None
    outcomes: list[RankOutcome] = []
    unknown: list[TraceSource] = []
    for source in sources:
        known = cached.recall(source.path, source.part, flops) if use_cache else None
        if known is None:
            unknown.append(source)
        else:
            outcomes.append(engine.Outcome(source, known, None))
            _tell(progress, len(outcomes), len(sources))
    if not unknown:
        return outcomes
    with executor_for(unknown, executor, workers) as chosen:
        work = functools.partial(_analyze, use_cache=use_cache, flops=flops)
        for outcome in _on_any_machine(work, unknown, chosen):
            outcomes.append(outcome)
            _tell(progress, len(outcomes), len(sources))
    if use_cache:
        cached.trim()
    return outcomes


def _tell(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)


@contextmanager
def executor_for(
    sources: Sequence[TraceSource], executor: Executor | None = None, workers: int | None = None
) -> Iterator[Executor]:
    """The executor given, else as many workers of this machine as are wanted, or as cores and memory allow."""
    if executor is not None:
        yield executor
        return
    sizes = [_size(source.path) for source in sources]
    memory = [_memory_needed(source.path, size) for source, size in zip(sources, sizes, strict=True)]
    with engine.local_executor(memory, sum(sizes), workers) as own:
        yield own


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # reading it will say why
        return 0


def _memory_needed(path: Path, size: int) -> int:
    unpacked = size * (_PACKING if path.name.endswith(_PACKED) else 1)
    return _WORKER_BYTES + int(unpacked * _MEMORY_PER_BYTE)


def _on_any_machine(
    work: Callable[[TraceSource], RankPartial], sources: Sequence[TraceSource], executor: Executor
) -> Iterator[RankOutcome]:
    """Map over sources by absolute path, which means the same in every worker; answer in the caller's words."""
    asked = {_absolute(source): source for source in sources}
    for outcome in engine.map_items(work, list(asked), executor):
        source = asked[outcome.item]
        sent, said = str(outcome.item.path), str(source.path)
        result = outcome.result
        if result is not None and sent != said:
            result = replace(result, source=result.source.replace(sent, said))
        error = outcome.error.replace(sent, said) if outcome.error is not None else None
        yield engine.Outcome(source, result, error)


def _absolute(source: TraceSource) -> TraceSource:
    return source if remote.is_remote(source.path) else replace(source, path=source.path.absolute())


def _analyze(source: TraceSource, *, use_cache: bool, flops: CustomFlops | None) -> RankPartial:
    return cached.analyze_file(source.path, source.part, use_cache=use_cache, flops=flops)
