"""Where in the code ranks stand: from stacks that lie beside the dumps, else from those in the dumps."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from perfscope.analyzers.hang.progress import Progress
from perfscope.analyzers.readers.flight import Frame
from perfscope.analyzers.readers.stacks import ThreadStack, main_thread, user_call
from perfscope.grouping import grouped
from perfscope.results.hang import HangCallSite

Stacks = Mapping[int, tuple[ThreadStack, ...]]

_CALLS_SHOWN: Final = 6
_COMMUNICATION: Final = re.compile(r"torch[/\\](?:distributed|autograd)[/\\]|[/\\](?:deepspeed[/\\]comm|horovod)[/\\]")
"""Files in which a rank waits for others; the backward does so in the hooks of DDP and FSDP."""


def call_sites(progress: Progress, stacks: Stacks, missing: Collection[int]) -> tuple[HangCallSite, ...]:
    """One for each place, those of missing ranks first, then those where most ranks stand."""
    found = grouped(
        ((rank in missing, source, calls), rank)
        for rank in sorted({*progress.dumps, *stacks})
        for source, calls in _calls_of(rank, progress, stacks)
    )
    merged = grouped(
        ((is_missing, source, call), (rank, calls))
        for (is_missing, source, calls), ranks in found.items()
        if (call := user_call(calls)) is not None
        for rank in ranks
    )
    sites = [
        HangCallSite(
            ranks=tuple(rank for rank, _ in having),
            file=call.file,
            line=call.line,
            function=call.function,
            source="stack" if source == "stack" else "flight recorder",
            missing=is_missing,
            calls=tuple(f"{each.function} ({each.file}:{each.line})" for each in _below(having[0][1], call)),
        )
        for (is_missing, source, call), having in merged.items()
    ]
    return tuple(sorted(sites, key=lambda site: (not site.missing, -len(site.ranks), site.ranks)))


def waits_in_communication(threads: tuple[ThreadStack, ...]) -> bool | None:
    """Does the main thread wait in a collective, or in the backward? None where it is not known."""
    thread = main_thread(threads)
    if thread is None:
        return None
    call = user_call(thread.calls)
    return any(_COMMUNICATION.search(each.file) for each in _below(thread.calls, call, limit=len(thread.calls)))


def _calls_of(rank: int, progress: Progress, stacks: Stacks) -> Iterator[tuple[str, tuple[Frame, ...]]]:
    """A rank's stack now; else that of the first operation that it waits for, or of its last one."""
    thread = main_thread(stacks.get(rank, ()))
    if thread is not None:
        yield "stack", thread.calls
        return
    dump = progress.dumps.get(rank)
    if dump is not None and dump.frames:
        rows = [op.row for op in progress.open_ops.get(rank, ()) if op.row in dump.frames]
        yield "dump", dump.frames[min(rows) if rows else max(dump.frames)]


def _below(calls: tuple[Frame, ...], call: Frame | None, limit: int = _CALLS_SHOWN) -> tuple[Frame, ...]:
    """The calls that ``call`` led to, innermost first."""
    return calls[: calls.index(call)][:limit] if call in calls else ()
