"""Ranks that pause for as long in nearly every step, and the others do not, where that is not plain otherwise: ranks
seem to be slow in turn, or to wait for cores.

On a machine that other programs use, too, every rank loses some time here and there. What one loses in one place of its
loop, or in one function, each time is of its own making, and the turns are the machine's.

Example: rank 0 sleeps for 15 ms behind each of eight optimizer steps; in three of them rank 1 waits for a core in its
backward for longer. The two are not slow in turn: rank 0 is steadily.

Where threads wait for cores so much that nobody is named for what the others wait, a rank is for pauses that are longer
than its waits for a core in nearly every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.replay.stragglers.own_time import over_others
from perfscope.results.categories import TimeCategory
from perfscope.results.rows import StragglerRow
from perfscope.trace.trace import Bool, Int64

_LEAST: Final = 0.05
"""Share of the step by which its pauses are longer than the others' in a step, at least."""
_OFTEN: Final = 0.8
"""Share of the steps in which they are."""
_OTHERS: Final = 0.25
"""Part of it by which another rank's are, at most."""
_FEWEST: Final = 4
"""Steps from which that is no chance."""
_MOSTLY: Final = 0.5
"""Part of it that is told of the rank already, from which nothing is added."""
_TWO: Final = 2
"""Ranks from which one can pause and others not."""


def with_steady_pauses(rows: Iterable[StragglerRow], result: AlignedJob) -> tuple[StragglerRow, ...]:
    """The stragglers, with the rank that pauses in nearly every step in the place of those in turn with it."""
    return tuple(_of_one_rank(row, result) for row in rows)


def with_steady_pauser(
    rows: tuple[StragglerRow, ...], result: AlignedJob, core_ns: Mapping[int, Int64]
) -> tuple[StragglerRow, ...]:
    """With the rank of a job on CPUs that pauses in one place in nearly every step, while the others wait; in the place
    of what is told of it for less.

    Waits for cores (``core_ns``) stop a thread now here and now there. Pauses in the same place in all steps are none;
    in fewer they must be longer than what the rank waits longer than the others.
    """
    on_devices = any(partial.has_device_work for partial in result.partials.values())
    if on_devices or len(result.partials) < _TWO or len(result.steps) < _FEWEST:
        return rows
    names = {name for partial in result.partials.values() for name in partial.named_host}
    found = [one for name in sorted(names) if (one := _pauser_in(name, result, core_ns)) is not None]
    worst = max(found, key=lambda row: row.lost_us, default=None)
    told = [row for row in rows if worst is not None and worst.rank in row.members]
    if worst is None or any(row.lost_us >= _MOSTLY * worst.lost_us for row in told):
        return rows
    return tuple(sorted((*(row for row in rows if row not in told), worst), key=lambda row: -row.lost_us))


def _pauser_in(name: str, result: AlignedJob, core_ns: Mapping[int, Int64]) -> StragglerRow | None:
    longer = _longer_ns(name, result)
    rank = max(longer, key=lambda rank: float(longer[rank].mean()))
    late = longer[rank] >= _LEAST * result.step_ns
    if not late.all() and set(core_ns) == set(result.partials):
        late = longer[rank] - np.maximum(_over_others(core_ns)[rank], 0) >= _LEAST * result.step_ns
    lost_us = min(float(longer[rank].mean()), _waited_ns(result, rank)) / 1e3
    if late.mean() < _OFTEN or lost_us < _LEAST * result.step_ns / 1e3:
        return None
    return StragglerRow(
        rank=rank, cause="host", lost_us=lost_us, confidence="medium", share_of_steps=float(late.mean()),
        host=result.hosts.names.get(rank, ""), ranks=(rank,), steps=_numbers(result, late),
    )  # fmt: skip


def _waited_ns(result: AlignedJob, rank: int) -> float:
    """What the other ranks wait for late ones per step, median."""
    waits = [result.totals[other][:, TimeCategory.COMM_WAIT].mean() for other in result.totals if other != rank]
    return float(np.median(waits))


def _numbers(result: AlignedJob, chosen: Bool) -> tuple[int, ...]:
    return tuple(int(step) for step in np.asarray(result.steps)[chosen])


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
    lost_us = min(row.lost_us, means[rank] / 1e3)
    return replace(
        row, rank=rank, ranks=(rank,), scope="rank", pattern="steady", steps=_numbers(result, late),
        share_of_steps=float(late.mean()),
        lost_us=lost_us,
    )  # fmt: skip


def _longer_ns(name: str, result: AlignedJob) -> dict[int, Int64]:
    """Rank -> by how much it takes longer in a named place in each used step than the other ranks (median)."""
    paused = {}
    for rank, partial in result.partials.items():
        steps, used = partial.steps, partial.steps.indices_of(result.steps)
        named = partial.named_host.get(name, Intervals.empty())
        paused[rank] = named.within(steps.host_start_ns[used], steps.host_end_ns[used])
    return _over_others(paused)


def _over_others(times_ns: Mapping[int, Int64]) -> dict[int, Int64]:
    """Rank -> by how much its times are longer than the others' (median), in each used step; empty of one rank."""
    if len(times_ns) < _TWO:
        return {}
    return dict(zip(times_ns, over_others(np.stack([*times_ns.values()])), strict=True))
