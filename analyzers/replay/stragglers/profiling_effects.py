"""Stragglers that are none: what they take in the recorded steps has no room in the steps without the profiler.

A rank may be slow only while it is recorded. What makes it the last then takes longer than a whole unprofiled step, so
it cannot take as long there; and at its peers' pace the recorded step is no shorter than an unprofiled one, so that one
has no straggler in it. Where the profiler slows many small operators, on every rank alike, that may be so with a true
straggler as well, so what recording these takes must not explain it. And a rank that has more work than the others
(FLOPs, where shapes are recorded) has it without the profiler, too.

Example: recorded steps take 387 ms, of which one rank computes 337 and the other 104; at the other's pace they would
take 156. Unprofiled steps take 154.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.replay.stragglers.own_time import flops_per_step
from perfscope.analyzers.replay.stragglers.straggler import CAUSES
from perfscope.results.attribution import CAUSE_PHRASES
from perfscope.results.notes import Note, note
from perfscope.results.rows import StragglerRow

_NO_ROOM: Final = 0.9
"""Share of the unprofiled step that the recorded one takes at its peers' pace, from which that is no shorter."""
_RECORDING_NS: Final = 30_000.0
"""What recording one operator, with shapes and on a busy machine, takes at most."""
_MORE_WORK: Final = 1.05
"""FLOPs of a rank, as a multiple of the others' median, from which it has more work."""


def without_profiling_effects(
    rows: Collection[StragglerRow], result: AlignedJob, unprofiled_us: float | None
) -> tuple[StragglerRow, ...]:
    """The stragglers that unprofiled steps, which take so long, have room for; all where that is not known."""
    if unprofiled_us is None:
        return tuple(rows)
    return tuple(row for row in rows if not _is_effect(row, result, unprofiled_us))


def profiling_effect_notes(
    rows: Collection[StragglerRow], result: AlignedJob, unprofiled_us: float | None
) -> Iterator[Note]:
    """That nobody is named for these: stragglers that ``without_profiling_effects`` leaves out."""
    if not rows or unprofiled_us is None:
        return
    worst = max(rows, key=lambda row: row.lost_us)
    yield note(
        "steps",
        "profiling_effect",
        worst.members,
        share=worst.lost_us * 1e3 / result.step_ns,
        what=CAUSE_PHRASES[worst.cause],
        own_ms=_of_cause_us(worst, result, worst.rank) / 1e3,
        unprofiled_ms=unprofiled_us / 1e3,
    )


def _is_effect(row: StragglerRow, result: AlignedJob, unprofiled_us: float) -> bool:
    step_us = result.step_ns / 1e3
    if step_us - row.lost_us < _NO_ROOM * unprofiled_us:
        return False
    if _NO_ROOM * min(_of_cause_us(row, result, rank) for rank in row.members) <= unprofiled_us:
        return False
    if row.cause == "compute" and _has_more_work(row, result):
        return False
    return step_us - unprofiled_us > max(_recording_us(result, rank) for rank in row.members)


def _has_more_work(row: StragglerRow, result: AlignedJob) -> bool:
    """Do its ranks compute more FLOPs than the others? Not where these are not recorded, or there are no others."""
    others = result.partials.keys() - row.members
    if not others:
        return False
    theirs = np.median(flops_per_step(result, sorted(others)).mean(axis=1))
    own = flops_per_step(result, row.members).mean(axis=1)
    return bool(theirs > 0 and own.min() >= _MORE_WORK * theirs)


def _of_cause_us(row: StragglerRow, result: AlignedJob, rank: int) -> float:
    """What a rank takes per step for what makes it slow, in all."""
    categories = [int(category) for category, cause in CAUSES.items() if cause == row.cause]
    return float(result.totals[rank][:, categories].sum(axis=1).mean()) / 1e3


def _recording_us(result: AlignedJob, rank: int) -> float:
    """What recording a rank's operators takes per step, at most."""
    partial = result.partials[rank]
    used = partial.steps.indices_of(result.steps)
    return float(partial.tables.operators.count[:, used].sum()) / len(used) * _RECORDING_NS / 1e3
