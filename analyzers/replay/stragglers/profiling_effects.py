"""Stragglers that are none: what they take in the recorded steps has no room in the steps without the profiler.

A rank may be slow only while it is recorded. What makes it the last then takes longer than a whole unprofiled step, so
it cannot take as long there; and at its peers' pace the recorded step is no shorter than an unprofiled one, so that one
has no straggler in it. Where the profiler slows many small operators, on every rank alike, that may be so with a true
straggler as well, so what recording these takes must not explain it. And a rank that has more work than the others
(FLOPs, where shapes are recorded) has it without the profiler, too.

Example: recorded steps take 387 ms, of which one rank computes 337 and the other 104; at the other's pace they would
take 156. Unprofiled steps take 154.

On CPUs the kernel's clocks tell more. A thread that computes longer, or runs Python longer, takes more CPU time, and
one that waits for the others takes none. Where that difference between ranks is gone in the unprofiled steps, so is the
straggler: for some hundred milliseconds the machine had less of a core for one rank than for the others.
Example: in recorded steps one rank's thread takes 47 ms of CPU time and the other's 35, in unprofiled ones 26 and 26.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.replay.stragglers.own_time import flops_per_step
from perfscope.analyzers.replay.stragglers.straggler import CAUSES
from perfscope.frozen import dataclass
from perfscope.recording.metadata import RunMetadata
from perfscope.results.attribution import CAUSE_PHRASES
from perfscope.results.notes import Note, note
from perfscope.results.rows import StragglerRow

_NO_ROOM: Final = 0.9
"""Share of the unprofiled step that the recorded one takes at its peers' pace, from which that is no shorter."""
_RECORDING_NS: Final = 30_000.0
"""What recording one operator, with shapes and on a busy machine, takes at most."""
_RUNNING: Final = frozenset({"compute", "host"})
"""Causes for which a thread takes more CPU time, unless it sleeps."""
_EXPLAINED: Final = 0.5
"""Part of what a straggler costs that its thread's CPU time must explain."""
_REMAINS: Final = 0.25
"""Part of its relative excess of CPU time that remains in the unprofiled steps of a straggler in those."""
_STEPS: Final = 8
"""Unprofiled steps from which their mean tells."""
_LONG: Final = 3.0
"""Times the median that one of them counts at most."""
_MORE_WORK: Final = 1.05
"""FLOPs of a rank, as a multiple of the others' median, from which it has more work."""


def without_profiling_effects(
    rows: Collection[StragglerRow], result: AlignedJob, runs: Mapping[int, RunMetadata], unprofiled_us: float | None
) -> tuple[StragglerRow, ...]:
    """The stragglers that unprofiled steps, which take so long, have, too; all where that is not known."""
    if unprofiled_us is None:
        return tuple(rows)
    room = (row for row in rows if not _is_effect(row, result, unprofiled_us))
    return tuple(row for row in room if not _in_recorded_steps_alone(row, result, runs))


def profiling_effect_notes(
    rows: Collection[StragglerRow], result: AlignedJob, runs: Mapping[int, RunMetadata], unprofiled_us: float | None
) -> Iterator[Note]:
    """That nobody is named for these: stragglers that ``without_profiling_effects`` leaves out."""
    if not rows or unprofiled_us is None:
        return
    worst = max(rows, key=lambda row: row.lost_us)
    if not _is_effect(worst, result, unprofiled_us):
        recorded, unprofiled = _cpu_times(worst, result.partials, runs) or (_NO_TIMES, _NO_TIMES)
        yield note(
            "steps",
            "recorded_steps_alone",
            worst.members,
            share=worst.lost_us * 1e3 / result.step_ns,
            what=CAUSE_PHRASES[worst.cause],
            recorded_ms=recorded.own_ns / 1e6,
            others_ms=recorded.others_ns / 1e6,
            unprofiled_ms=unprofiled.own_ns / 1e6,
            unprofiled_others_ms=unprofiled.others_ns / 1e6,
        )
        return
    yield note(
        "steps",
        "profiling_effect",
        worst.members,
        share=worst.lost_us * 1e3 / result.step_ns,
        what=CAUSE_PHRASES[worst.cause],
        own_ms=_of_cause_us(worst, result, worst.rank) / 1e3,
        unprofiled_ms=unprofiled_us / 1e3,
    )


@dataclass(frozen=True)
class _CpuTimes:
    """CPU time of training threads per step, ns: of a straggler's ranks, the least of them, and the others' median."""

    own_ns: float
    others_ns: float

    @property
    def excess(self) -> float:
        """As a share of the others'."""
        return self.own_ns / self.others_ns - 1


_NO_TIMES: Final = _CpuTimes(0.0, 0.0)


def runs_longer_unprofiled(row: StragglerRow, ranks: Collection[int], runs: Mapping[int, RunMetadata]) -> bool | None:
    """Does a straggler of a job of these ``ranks``, on CPUs, that takes more CPU time than the others in the recorded
    steps do so in the unprofiled ones, too? None where that is not recorded, or is not what it costs.
    """
    if row.cause not in _RUNNING or row.pattern == "rotating":
        return None
    times = _cpu_times(row, ranks, runs)
    if times is None:
        return None
    recorded, unprofiled = times
    if recorded.own_ns - recorded.others_ns < _EXPLAINED * row.lost_us * 1e3:
        return None
    return unprofiled.excess >= _REMAINS * recorded.excess


def _in_recorded_steps_alone(row: StragglerRow, result: AlignedJob, runs: Mapping[int, RunMetadata]) -> bool:
    on_devices = any(partial.has_device_work for partial in result.partials.values())
    return not on_devices and runs_longer_unprofiled(row, result.partials, runs) is False


def _cpu_times(
    row: StragglerRow, ranks: Collection[int], runs: Mapping[int, RunMetadata]
) -> tuple[_CpuTimes, _CpuTimes] | None:
    """(in recorded steps, in unprofiled ones); None where not recorded of all ranks, or all are slow.

    Means, as a straggler may be slow in few steps; of ``_LONG`` medians at most count of a step, as checkpoints,
    evaluations and compiling take more.
    """
    known: dict[int, tuple[float, float]] = {}
    for rank in ranks:
        run = runs.get(rank)
        if run is None or run.cpu is None or not run.cpu.steps or not run.cpu.thread_ns:
            return None
        if len(run.steps.unprofiled_thread_ns) < _STEPS:
            return None
        known[rank] = run.cpu.thread_ns / run.cpu.steps, usual_mean(run.steps.unprofiled_thread_ns)
    members = [known[rank] for rank in row.members if rank in known]
    others = [times for rank, times in known.items() if rank not in row.members]
    if not members or not others or not all(time > 0 for times in others for time in times):
        return None
    recorded, unprofiled = (
        _CpuTimes(min(times[place] for times in members), median(times[place] for times in others)) for place in (0, 1)
    )
    return recorded, unprofiled


def usual_mean(steps_ns: Sequence[int]) -> float:
    """The mean of what steps take, with no more than ``_LONG`` medians of one."""
    most = _LONG * median(steps_ns)
    return fmean(min(step, most) for step in steps_ns)


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
