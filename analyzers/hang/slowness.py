"""Does a job stand still, or is it only slow? Dumps may be taken while it works, and some rank is always last."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.hang.blocked import BlockedOp
from perfscope.analyzers.hang.progress import Progress, job_groups
from perfscope.analyzers.readers.flight import DONE, label_rows
from perfscope.trace.trace import Int64

LONG_NS: Final = 10_000_000_000
"""A wait of this length is no slowness, where the dumps show that it took so long."""

_ENOUGH: Final = 10
"""Collectives from which a rank's lateness is a habit."""
_MOSTLY: Final = 0.8
"""Share of them that it is last in."""
_SECOND_NS: Final = 1_000_000_000
_LONGEST_TIMEOUT_NS: Final = 600_000_000_000
"""NCCL's, unless a job sets another."""
_FEW: Final = 2
"""Ranks that may be the cause of a standstill which nothing but their absence shows,"""
_FEW_OF: Final = 3
"""or one for so many others."""
_NOTABLE: Final = 0.3
"""Of the time from one collective to the next: less is scatter, by which some rank is always last."""


def certainly_stands(progress: Progress, blocked: Sequence[BlockedOp]) -> bool:
    """Did a watchdog give up, are operations unlike, or does the wait exceed what a slow rank could explain?"""
    if any(op.variants or part.timed_out for op in blocked for part in op.waiting.values()):
        return True
    return waited_ns(progress, blocked) >= LONG_NS


def silent_when_written(progress: Progress) -> bool | None:
    """Had every rank been silent for longer than usual when its dump was written? None where the time is not known.

    A file tells it by its modification time. One that is later than two timeouts is that of a copy.
    """
    dumps = [dump for dump in progress.dumps.values() if dump.last_event_ns]
    if not dumps:
        return None
    silence = min((dump.written_ns or dump.modified_ns) - dump.last_event_ns for dump in dumps)
    pauses = [int(np.diff(np.sort(dump.created_ns)).max(initial=0)) for dump in dumps]
    if -_SECOND_NS <= silence <= max(_SECOND_NS, 2 * float(np.median(pauses or 0))):
        return False
    timeout_ns = max(int(dump.timeout_ns.max(initial=0)) for dump in dumps) or _LONGEST_TIMEOUT_NS
    return True if 0 < silence <= 2 * timeout_ns else None


def waited_ns(progress: Progress, blocked: Sequence[BlockedOp]) -> int:
    """The longest wait that the dumps show: at least so long, since nobody writes into a dump when it was taken."""
    last = max((dump.last_ns + progress.offsets_ns.get(rank, 0) for rank, dump in progress.dumps.items()), default=0)
    return max((last - op.since_ns for op in blocked if op.since_ns > 0), default=0)


def is_habitually_late(progress: Progress, blocked: Sequence[BlockedOp], ranks: Collection[int]) -> bool:
    """Do ``ranks`` come last to most collectives, by as much as the others wait for them now?"""
    late = _lateness_ns(progress, ranks)
    if len(late) < _ENOUGH or float((late > 0).mean()) < _MOSTLY:
        return False
    awaited = [op for op in blocked if op.missing & set(ranks)]
    return waited_ns(progress, awaited) <= 2 * float(np.percentile(late, 90))


def all_wait(progress: Progress, ranks: Collection[int]) -> bool:
    """Does every rank but ``ranks`` wait, and are these few? In a job that goes on many ranks are on their way."""
    others = [rank for rank, dump in progress.dumps.items() if rank not in ranks and len(dump.group)]
    own = [rank for rank in ranks if rank in progress.dumps]
    few = len(own) <= min(len(others), max(_FEW, len(others) // _FEW_OF))
    return few and all(progress.open_ops[rank] for rank in others)


def _lateness_ns(progress: Progress, ranks: Collection[int]) -> Int64:
    """How long after the last of the others the last of ``ranks`` came to each collective that is done.

    Empty where that is no notable part of the time from one collective to the next.
    """
    groups, sequences, created, own = [], [], [], []
    for rank, dump in progress.dumps.items():
        rows = np.flatnonzero(~dump.p2p & (dump.state == DONE))
        if not len(rows):
            continue
        groups.append(job_groups(dump, progress.numbers[rank])[rows])
        sequences.append(dump.sequence[rows])
        created.append(dump.created_ns[rows] + progress.offsets_ns.get(rank, 0))
        own.append(np.full(len(rows), rank in ranks))
    if not own:
        return np.zeros(0, dtype=np.int64)
    instance = label_rows(np.concatenate(groups), np.concatenate(sequences))
    times, mine = np.concatenate(created), np.concatenate(own)
    count = int(instance.max()) + 1
    last = np.zeros((2, count), dtype=np.int64)
    for side, chosen in enumerate((mine, ~mine)):
        np.maximum.at(last[side], instance[chosen], times[chosen])
    both = (last > 0).all(axis=0)
    late: Int64 = (last[0] - last[1])[both]
    if len(late) < _ENOUGH:
        return late
    gap = float(np.ptp(last[0][both])) / len(late)
    return late if float(np.median(late)) >= _NOTABLE * gap else np.zeros(0, dtype=np.int64)
