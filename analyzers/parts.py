"""One file may hold several ranks: makes each of them an item of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from perfscope import engine, machine, remote
from perfscope.analyzers import readers
from perfscope.errors import TraceError
from perfscope.job import TRACE_SUFFIXES, TraceSource


def split(sources: Sequence[TraceSource]) -> tuple[tuple[TraceSource, ...], list[engine.Outcome[TraceSource, Any]]]:
    """(sources of one rank each, failures of files that cannot be opened).

    A Chrome trace is one rank, and is not looked into. A report is looked into here, which may mean to export it first:
    side by side, since that is the work of programs of their own.
    """
    several = [source for source in sources if not source.path.name.endswith(TRACE_SUFFIXES)]
    if not several:
        return tuple(sources), []
    split_up: dict[TraceSource, list[TraceSource]] = {}
    failures: list[engine.Outcome[TraceSource, Any]] = []
    with ThreadPoolExecutor(min(len(several), machine.available_cores())) as pool:
        for outcome in engine.map_items(_parts_of, several, pool):
            if outcome.result is None:
                failures.append(outcome)
            else:
                split_up[outcome.item] = outcome.result
    failed = {outcome.item for outcome in failures}
    return tuple(
        part for source in sources if source not in failed for part in split_up.get(source, [source])
    ), failures


def _parts_of(source: TraceSource) -> list[TraceSource]:
    if remote.is_remote(source.path):
        raise TraceError(f"{source.path}: Nsight Systems' files are read from disk only; copy it here first")
    parts = readers.parts(source.path)
    # The name of a file speaks for it only where it is one rank.
    named_rank = source.named_rank if len(parts) == 1 else None
    return [replace(source, part=part, named_rank=named_rank) for part in parts]
