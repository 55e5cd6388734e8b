"""Steps among the allocator's actions, and what holds more memory at the begin of each.

Steps begin where ``ProfilerStep`` ranges do, where these were recorded; else at the first allocation of a forward after
an optimizer's, and where the optimizer allocates nothing, after a backward's. A place in the code grows where it never
holds less than at the step before, and more at half of the steps, in the first and in the second half of them. The
first step is left out: optimizer states and gradients are made in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from perfscope.analyzers.readers.plain_values import column
from perfscope.analyzers.readers.snapshot import ALLOC, Annotation, Snapshot
from perfscope.analyzers.snapshots.holders import Allocations, described
from perfscope.analyzers.snapshots.sites import BACKWARD, FORWARD, OPTIMIZER
from perfscope.results.memory.snapshots import GrowthRow
from perfscope.trace.trace import Int64

LEAST_STEPS: Final = 5
"""Fewer show no trend."""
NOTICEABLE: Final = 1e-6
"""Growth in a step as a share of the peak: 1 % of it in 10,000 steps."""
_STEP: Final = "ProfilerStep#"


def step_begins(snapshot: Snapshot, found: Allocations) -> Int64:
    """The action before which each step begins; empty where nothing shows steps."""
    marked = _of_annotations(snapshot.annotations, found)
    if len(marked) > 1:
        return marked
    return _of_phases(found)


def growth(found: Allocations, begins: Int64, rank: int | None) -> Iterator[GrowthRow]:
    """What grows, the fastest first."""
    if len(begins) < LEAST_STEPS:
        return
    held = _held_at(found, begins[1:])
    change = np.diff(held, axis=1)
    more = change > 0
    half = change.shape[1] // 2
    grows = (change >= 0).all(axis=1) & (2 * more.sum(axis=1) >= change.shape[1])
    grows &= more[:, :half].any(axis=1) & more[:, half:].any(axis=1)
    by_step = change.mean(axis=1)
    least = NOTICEABLE * found.lives.allocated_after(found.lives.peak)
    for place in sorted(np.flatnonzero(grows & (by_step >= least)).tolist(), key=lambda each: -by_step[each]):
        yield GrowthRow(
            rank=rank,
            device=found.device.device,
            **described(found.places[place]),
            bytes_per_step=int(by_step[place]),
            first_bytes=int(held[place, 0]),
            last_bytes=int(held[place, -1]),
            steps=change.shape[1],
        )


def _held_at(found: Allocations, begins: Int64) -> Int64:
    """Bytes of each place just before each step's begin."""
    lives = found.lives
    first = np.searchsorted(begins, lives.begin, side="right")
    past = np.searchsorted(begins, lives.end, side="right")
    change = np.zeros((len(found.places), len(begins) + 1), dtype=np.int64)
    np.add.at(change, (found.place, first), lives.size)
    np.add.at(change, (found.place, past), -lives.size)
    held: Int64 = np.cumsum(change, axis=1)[:, :-1]
    return held


def _of_annotations(annotations: tuple[Annotation, ...], found: Allocations) -> Int64:
    times = found.device.time_us
    if not len(times) or times[0] <= 0:
        return column([])
    begins = [each.time_us for each in annotations if each.name.startswith(_STEP)]
    inside = sorted({time for time in begins if times[0] <= time <= times[-1]})
    return np.searchsorted(times, column(inside)).astype(np.int64)


def _of_phases(found: Allocations) -> Int64:
    """From the order in which phases allocate."""
    allocates = found.device.action == ALLOC
    rows = np.flatnonzero(allocates)
    phases = [found.of_stack[stack].phase for stack in found.device.stack[allocates].tolist()]
    ends = OPTIMIZER if phases.count(OPTIMIZER) and _returns(phases) else BACKWARD
    begins, ended = [], True
    for row, phase in zip(rows.tolist(), phases, strict=True):
        if phase == ends:
            ended = True
        elif phase == FORWARD and ended:
            begins.append(row)
            ended = False
    return column(begins)


def _returns(phases: list[str]) -> bool:
    """Does the optimizer allocate again after a later forward? States alone are allocated once."""
    last = len(phases) - 1 - phases[::-1].index(OPTIMIZER)
    return FORWARD in phases[phases.index(OPTIMIZER) : last]
