"""Stragglers that are none: ranks that others wait for because their training threads waited for a core.

Where other processes keep the cores busy, the scheduler lets now one rank wait for longer, now another. Over some steps
one of them is then slower than its peers although it did the same work. A rank is one only by more than that: by its
CPU time, by blocking, or because its threads alone wait. One that is the last in some steps only must be late by more
than a part of what all wait for cores: over all steps that may be as long for each, and late is who waited just then.
Where each step's waits are recorded, they tell: in the steps in which a rank is late, its own time and its waits for a
core are compared with those in its other steps. What ranks in turn have more to do tells before that: uneven work takes
longer where cores are busy, most of it in waits for them, and is uneven all the same.

Example, per step: two ranks compute for 70 and 77 ms, and wait 270 and 315 ms for a core, so that one of them is late
by 50 ms. Of these 45 are the core's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.replay.stragglers.own_time import flops_per_step, flops_vary
from perfscope.analyzers.replay.stragglers.straggler import OWN
from perfscope.frozen import dataclass
from perfscope.recording.metadata import RunMetadata
from perfscope.results.categories import TimeCategory
from perfscope.results.notes import Note, note
from perfscope.results.rows import StragglerRow
from perfscope.results.system import System
from perfscope.trace.trace import Bool, Float64, Int64

MOSTLY: Final = 0.5
"""From this part of a straggler's cost on, waiting for a core explains it."""
AS_MUCH: Final = 0.15
"""Share by which the CPU time of ranks with the same work may differ where cores are busy, and with them caches and
hyper-threads: 13 % was seen."""
ALONE: Final = 2.0
"""From this many times its peers' wait for a core on, it is that rank which waits."""
BY_ITSELF: Final = 0.15
"""From this share of the step on that a rank blocks for longer than its peers (sleeps, reads files), it is late without
what it waits for cores, too."""
NOT_ALWAYS: Final = 0.8
"""Below this share of the steps in which it costs the most, a rank is not late in each of them."""
OF_WAITS: Final = 0.5
"""Part of what all ranks wait for cores that one of them may be late by, here and there."""
OF_LATE_STEPS: Final = 2 / 3
"""From this part of what late steps take longer on, waiting for a core explains it. Which steps are late is chosen by
what they take, so what is waited in them is above the mean also where something else makes them late."""
_ON_CORES: Final = ("compute", "launch", "host")
"""Causes that are time on a core; compute is where the host is the device."""
_BLOCKING: Final = [TimeCategory.COMM_WAIT, TimeCategory.COMM_TRANSFER, TimeCategory.DATALOADER]
"""In which a rank's host need not run."""


@dataclass(frozen=True)
class _OnCores:
    """One rank's training thread, ns per step: on a core, ready to run without one, and neither, other than in
    communication and for batches.
    """

    ran_ns: float
    waited_ns: float
    blocked_ns: float

    @classmethod
    def of(cls, run: RunMetadata, result: AlignedJob) -> _OnCores | None:
        cpu = run.cpu
        if cpu is None or not cpu.steps or cpu.waited_ns is None or run.rank not in result.totals:
            return None
        elsewhere_ns = float(result.totals[run.rank][:, _BLOCKING].sum(axis=1).mean())
        return cls(cpu.thread_ns / cpu.steps, cpu.waited_ns / cpu.steps, max(cpu.blocked_ns - elsewhere_ns, 0.0))


def without_contention(
    rows: Collection[StragglerRow],
    result: AlignedJob,
    runs: Mapping[int, RunMetadata],
    machines: System | None,
    core_ns: Mapping[int, Int64] | None = None,
) -> tuple[StragglerRow, ...]:
    """The stragglers whose cost is their own, as far as the ranks recorded how long they waited for cores.

    ``core_ns``: rank -> how long it waited in each used step, of all ranks; None or empty where not recorded.
    """
    on_cores = {rank: times for rank, run in runs.items() if (times := _OnCores.of(run, result)) is not None}
    stolen = {rank: host.steal_share or 0.0 for host in (machines.hosts if machines else ()) for rank in host.ranks}
    return tuple(row for row in rows if not _is_contention(row, result, on_cores, stolen, core_ns or {}))


def contention_notes(rows: Collection[StragglerRow], step_us: float) -> Iterator[Note]:
    """That nobody is named for these: stragglers that ``without_contention`` leaves out."""
    if rows:
        worst = max(rows, key=lambda row: row.lost_us)
        yield note("machines", "waited_for_cores", worst.members, share=worst.lost_us / step_us)


def _is_contention(
    row: StragglerRow,
    result: AlignedJob,
    on_cores: Mapping[int, _OnCores],
    stolen: Mapping[int, float],
    core_ns: Mapping[int, Int64],
) -> bool:
    mine = set(row.members)
    devices = any(result.partials[rank].has_device_work for rank in mine)
    if row.cause not in _ON_CORES or (devices and row.cause == "compute"):
        return False
    least_ns = MOSTLY * row.lost_us * 1e3
    usual = _usual(mine, on_cores) if row.scope != "job" else None
    if usual is not None and all(_is_late_by_itself(on_cores[rank], usual, row, result) for rank in mine):
        return False  # whenever it is late, it has most of that to do
    if row.scope == "job" and row.cause != "host" and _more_work(mine, result, on_cores) >= least_ns:
        return False
    slept = all(rank in on_cores and on_cores[rank].blocked_ns >= least_ns for rank in mine)
    told = _told_by_steps(row, result, core_ns, slept=slept)
    if told is not None:
        return told
    if row.scope == "job":
        return _waits_in_turn(row, result, on_cores)
    if all(stolen.get(rank, 0.0) * result.step_ns >= least_ns for rank in mine):
        return True
    if usual is None:
        return False
    if row.share_of_steps < NOT_ALWAYS and all(_is_noise(on_cores[rank], usual, row.lost_us * 1e3) for rank in mine):
        return True
    if any(on_cores[rank].blocked_ns - usual.blocked_ns >= BY_ITSELF * result.step_ns for rank in mine):
        return False
    return all(_waits_as_others_do(on_cores[rank], usual, least_ns) for rank in mine)


def _waits_in_turn(row: StragglerRow, result: AlignedJob, on_cores: Mapping[int, _OnCores]) -> bool:
    """Do ranks that are late in turn, which each step's waits do not tell of, wait for a core as long? Those that pause
    in turn must not sleep.
    """
    least_waited = _least(on_cores, result.partials)
    if row.cause == "host":
        awake = all(rank in on_cores and on_cores[rank].blocked_ns < MOSTLY * row.lost_us * 1e3 for rank in row.members)
        return awake and row.lost_us * 1e3 <= OF_WAITS * least_waited
    same_work = not flops_vary(flops_per_step(result, result.partials))
    return same_work and least_waited >= MOSTLY * row.lost_us * 1e3


def _told_by_steps(row: StragglerRow, result: AlignedJob, core_ns: Mapping[int, Int64], *, slept: bool) -> bool | None:
    """Do the waits of each step show that these stragglers are contention, or that they are not? None where the waits
    are not recorded, or tell neither. ``slept``: did they sleep for as long as contention must explain?
    """
    if not core_ns or (row.scope != "job" and row.share_of_steps >= NOT_ALWAYS):
        return None
    part = _part_in_late_steps(row, result, core_ns)
    if part is None:
        return None
    if row.scope == "job" or part >= OF_LATE_STEPS:
        return part >= OF_LATE_STEPS
    # Peers that sleep as much in other steps hide it in the means, but no wait for a core does that.
    return False if row.cause == "host" and slept and part < 1 - OF_LATE_STEPS else None


def _usual(mine: Collection[int], on_cores: Mapping[int, _OnCores]) -> _OnCores | None:
    """The median of the other ranks; None where that, or what one of these ranks does, is not known."""
    others = [times for rank, times in on_cores.items() if rank not in mine]
    if not others or any(rank not in on_cores for rank in mine):
        return None
    return _OnCores(*np.median([(each.ran_ns, each.waited_ns, each.blocked_ns) for each in others], axis=0).tolist())


def _more_work(mine: Collection[int], result: AlignedJob, on_cores: Mapping[int, _OnCores]) -> float:
    """What the rank with the most work of each step takes longer for it than these ranks do on the mean, ns per step,
    where cores are shared as they share them. 0 where their CPU time is not known.

    By FLOPs, or without shapes by the CPU time of a rank that has more to do in all steps. Example: two ranks with 10
    and 30 GFLOP per step run for 25 and 75 ms, and wait twice as long for a core. Their mean is 20 GFLOP in 150 ms: the
    10 that one has above it take 75.
    """
    if any(rank not in on_cores for rank in mine):
        return 0.0
    flops = flops_per_step(result, sorted(mine))
    if not flops.all():
        others = {rank: _usual([rank], {each: on_cores[each] for each in mine}) for rank in mine}
        return max(_works_longer(on_cores[rank], usual) if usual else 0.0 for rank, usual in others.items())
    taken_ns = float(np.mean([on_cores[rank].ran_ns + on_cores[rank].waited_ns for rank in mine]))
    return taken_ns * float((flops.max(axis=0) - flops.mean(axis=0)).mean() / flops.mean())


def _part_in_late_steps(row: StragglerRow, result: AlignedJob, core_ns: Mapping[int, Int64]) -> float | None:
    """What of the own time that late steps take longer than the same rank's other steps is waiting for a core; None
    where there are no steps of both kinds, or late steps are not longer by that time.

    Example: a rank's own time is 30 ms in late steps and 20 in others, of which it waits 4 and 2 ms for a core: 0.2.
    """
    ranks = sorted(core_ns)
    own = np.stack([result.totals[rank][:, OWN].sum(axis=1) for rank in ranks]).astype(np.float64)
    waited = np.stack([core_ns[rank] for rank in ranks]).astype(np.float64)
    mine = [ranks.index(rank) for rank in row.members if rank in core_ns]
    late = _late_steps(own, mine, np.isin(result.steps, row.steps), in_turn=row.scope == "job")
    longer = in_core = 0.0
    for line in mine:
        steps = late[line]
        if steps.any() and not steps.all():
            count = int(steps.sum())
            longer += count * float(own[line, steps].mean() - own[line, ~steps].mean())
            in_core += count * float(waited[line, steps].mean() - waited[line, ~steps].mean())
    return in_core / longer if longer >= MOSTLY * row.lost_us * 1e3 * len(result.steps) else None


def _late_steps(own: Float64, mine: Sequence[int], costs: Bool, *, in_turn: bool) -> Bool:
    """[rank, step]: the steps that cost time in which each of these ranks (lines) is late; ``in_turn``: each step is
    that of the rank that is farthest above what its steps usually take.
    """
    late = np.zeros(own.shape, dtype=np.bool_)
    if not in_turn:
        late[mine] = costs
        return late
    above = own[mine] - np.median(own[mine], axis=1, keepdims=True)
    late[np.asarray(mine)[above.argmax(axis=0)], np.arange(own.shape[1])] = costs
    return late


def _is_late_by_itself(mine: _OnCores, usual: _OnCores, row: StragglerRow, result: AlignedJob) -> bool:
    """Has a rank more work than its peers for most of what it costs, or does it block for all of that?"""
    if _works_longer(mine, usual) >= MOSTLY * row.lost_us * 1e3:
        return True
    return mine.blocked_ns - usual.blocked_ns >= max(row.lost_us * 1e3, BY_ITSELF * result.step_ns)


def _waits_as_others_do(mine: _OnCores, usual: _OnCores, least_ns: float) -> bool:
    """Does a rank with its peers' work wait for a core as they do, only for so much longer? More work takes longer by
    what they wait for as much of it, too.
    """
    longer_ns = _works_longer(mine, usual)
    return longer_ns < least_ns <= mine.waited_ns - usual.waited_ns < (ALONE - 1) * usual.waited_ns


def _is_noise(mine: _OnCores, usual: _OnCores, lost_ns: float) -> bool:
    """Is what a rank costs in some of the steps little beside what it and its peers wait for cores, and has it neither
    more work nor anything of its own to block in?
    """
    own_ns = max(_works_longer(mine, usual), mine.blocked_ns - usual.blocked_ns)
    return own_ns < MOSTLY * lost_ns and lost_ns <= OF_WAITS * min(mine.waited_ns, usual.waited_ns)


def _works_longer(mine: _OnCores, usual: _OnCores) -> float:
    """What a rank's further CPU time takes where cores are shared as its peers share them, ns per step."""
    slowdown = 1 + usual.waited_ns / usual.ran_ns if usual.ran_ns else 1.0
    return (mine.ran_ns - (1 + AS_MUCH) * usual.ran_ns) * slowdown


def _least(on_cores: Mapping[int, _OnCores], ranks: Collection[int]) -> float:
    """How long each of the ranks waits for a core at least, ns per step; 0 where one did not record it."""
    return min((on_cores[rank].waited_ns if rank in on_cores else 0.0 for rank in ranks), default=0.0)
