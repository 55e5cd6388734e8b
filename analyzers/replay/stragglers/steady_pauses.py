"""Ranks that seem to be slow in turn, where one of them pauses for as long in nearly every step.

On a machine that other programs use, too, every rank loses some time here and there. What one loses in one place of its
loop, or in one function, each time is of its own making, and the turns are the machine's.

Example: rank 0 sleeps for 15 ms behind each of eight optimizer steps; in three of them rank 1 waits for a core in its
backward for longer. The two are not slow in turn: rank 0 is steadily.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.results.rows import StragglerRow
from perfscope.trace.trace import Float64

_LEAST: Final = 0.05
"""Share of the step by which its pauses are longer than the others' in a step, at least."""
_OFTEN: Final = 0.8
"""Share of the steps in which they are."""
_OTHERS: Final = 0.25
"""Part of it by which another rank's are, at most."""
_FEWEST: Final = 4
"""Steps from which that is no chance."""


def with_steady_pauses(rows: Iterable[StragglerRow], result: AlignedJob) -> tuple[StragglerRow, ...]:
    """The stragglers, with the rank that pauses in nearly every step in the place of those in turn with it."""
    return tuple(_of_one_rank(row, result) for row in rows)


def _of_one_rank(row: StragglerRow, result: AlignedJob) -> StragglerRow:
    if row.scope != "job" or row.cause != "host" or len(result.steps) < _FEWEST:
        return row
    names = {name for rank in row.members for name in result.partials[rank].named_host}
    found = [one for name in sorted(names) if (one := _steady_in(name, row, result)) is not None]
    return max(found, key=lambda one: one.lost_us, default=row)


def _steady_in(name: str, row: StragglerRow, result: AlignedJob) -> StragglerRow | None:
    """The rank that pauses longest in one named place, if it does so in nearly every step, and the others do not."""
    longer = _longer_ns(name, result)
    means = {rank: float(longer[rank].mean()) for rank in row.members if rank in longer}
    rank = max(means, key=means.__getitem__, default=None)
    if rank is None:
        return None
    late = longer[rank] >= _LEAST * result.step_ns
    others = max((mean for other, mean in means.items() if other != rank), default=0.0)
    if late.mean() < _OFTEN or others > _OTHERS * means[rank]:
        return None
    steps = tuple(int(step) for step in np.asarray(result.steps)[late])
    lost_us = min(row.lost_us, means[rank] / 1e3)
    return replace(
        row, rank=rank, ranks=(rank,), scope="rank", pattern="steady", steps=steps, share_of_steps=float(late.mean()),
        lost_us=lost_us,
    )  # fmt: skip


def _longer_ns(name: str, result: AlignedJob) -> dict[int, Float64]:
    """Rank -> by how much it takes longer in a named place in each used step than the other ranks (median)."""
    paused = {}
    for rank, partial in result.partials.items():
        steps, used = partial.steps, partial.steps.indices_of(result.steps)
        named = partial.named_host.get(name, Intervals.empty())
        paused[rank] = named.within(steps.host_start_ns[used], steps.host_end_ns[used]).astype(np.float64)
    return {
        rank: mine - np.median([each for other, each in paused.items() if other != rank], axis=0)
        for rank, mine in paused.items()
        if len(paused) > 1
    }
