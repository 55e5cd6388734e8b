"""The ranks side by side: common steps, aligned clocks, waits split from transfers, time breakdowns."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, reduce
from typing import Final

import numpy as np

from perfscope.analyzers.job.collectives.matched import EXCHANGE, MatchedCollectives
from perfscope.analyzers.job.collectives.matching import match
from perfscope.analyzers.job.collectives.unmatched import Mismatch
from perfscope.analyzers.job.deliveries import shown_in_turn, taking_at_most_ns
from perfscope.analyzers.job.hosts import Hosts, find_hosts
from perfscope.analyzers.rank.host_activity import EVALUATING
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.analyzers.rank.timeline import Timeline
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.results.time_breakdown import TimeBreakdown
from perfscope.trace.clock import Clocks
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import Bool, Int64

EVALUATED_AT_MOST: Final = 0.5
"""Share of steps with an evaluation up to which they are left out: occasional evaluations are not training; where most
steps evaluate, that is how the job trains (reinforcement learning, say)."""

_STARTING: Final = 3.0
"""Times the median of the steps after it that a job's first step takes at least, where it starts libraries."""
_AGAIN: Final = 0.7
"""Part of its time from which another step is as long: such steps recur, as with parameters averaged now and then."""
_FIRST: Final = 2
"""Highest number of such a step: in recordings that begin later the job has started."""
_AFTER: Final = 3
"""Least number of steps after it."""


@dataclass(frozen=True, eq=False)
class AlignedJob:
    """The ranks side by side. ``steps`` are the job's step numbers that every rank has; ``windows`` are per rank.

    ``totals`` holds, for each rank, ns of each category (columns) in each used step (rows); rows add up to the windows.
    """

    partials: Mapping[int, RankPartial]
    steps: Int64
    windows: Mapping[int, tuple[Int64, Int64]]
    """Rank -> starts and ends of its used windows, own clock, ns."""
    timelines: Mapping[int, Timeline]
    totals: Mapping[int, Int64]
    communication: Mapping[int, Int64]
    """Rank -> ns of communication, overlapped or exposed, in each used step."""
    matched: MatchedCollectives
    """Collectives of the used steps."""
    matched_before: MatchedCollectives
    """Those, and the ones of recorded steps before the first used one."""
    clocks: Clocks
    mismatches: tuple[Mismatch, ...]
    hosts: Hosts
    evaluated: Int64
    """Steps in which some rank evaluated the model: left out of ``steps``, unless that holds for most steps."""
    starting: Int64
    """The job's first steps, left out because they take many times as long as those after them."""

    @property
    def is_marked(self) -> bool:
        """Does every rank's trace mark steps? Otherwise the whole recording is one step."""
        return all(partial.steps.marked for partial in self.partials.values())

    def mean_step_ns(self, rank: int) -> float:
        """Mean window of one rank."""
        start, end = self.windows[rank]
        return float((end - start).sum()) / len(start)

    @cached_property
    def copied_beside_ns(self) -> dict[int, Int64]:
        """Each rank's copies beside its computation in each used step (``Progress.beside_ns``)."""
        return {
            rank: partial.progress.beside_ns[partial.steps.indices_of(self.steps)]
            for rank, partial in self.partials.items()
        }

    @cached_property
    def job_windows(self) -> tuple[Int64, Int64]:
        """Begin and end of each used step of the job, on the common clock: see ``job_windows``."""
        begin, end = self._windows
        return job_windows(begin, end, self.assumed_ns(self.steps), self.clocks.aligned)

    @cached_property
    def _windows(self) -> tuple[Int64, Int64]:
        """Begins and ends of all ranks (lines) on the common clock."""
        both = [[self.clocks.to_common(rank, edge) for edge in edges] for rank, edges in self.windows.items()]
        begin, end = (np.stack(edges) for edges in zip(*both, strict=True))
        return begin, end

    def assumed_ns(self, steps: Int64) -> Int64:
        """``Steps.assumed_ns`` of each rank (lines) in these steps."""
        own = [self.partials[rank].steps for rank in self.windows]
        return np.stack([each.assumed_ns[each.indices_of(steps)] for each in own])

    @property
    def last(self) -> int:
        """The rank that ends the last used step last (the lowest among equals)."""
        until = int(self.job_windows[1][-1])
        ends = {rank: self.clocks.to_common(rank, int(end[-1])) for rank, (_, end) in self.windows.items()}
        return min(rank for rank, end in ends.items() if end == until)

    @property
    def step_ns(self) -> float:
        """Job step time: the mean of ``job_windows``."""
        begin, end = self.job_windows
        return float((end - begin).sum()) / len(begin)

    @property
    def longest_step_ns(self) -> float:
        """The same if nothing were assumed of where ranks begin: the device was idle there."""
        begin, end = self._windows
        assumed = self.assumed_ns(self.steps)
        first, last = job_windows(begin - assumed, end, np.zeros_like(assumed), self.clocks.aligned)
        return float((last - first).sum()) / len(first)

    @property
    def evaluated_share(self) -> float:
        """Share of the recorded steps' time that the ``evaluated`` take, mean over the ranks."""
        every = np.union1d(self.steps, self.evaluated)
        shares = []
        for partial in self.partials.values():
            index = partial.steps.indices_of(every)
            took = partial.steps.end_ns[index] - partial.steps.start_ns[index]
            shares.append(took[np.isin(every, self.evaluated)].sum() / max(took.sum(), 1))
        return float(np.mean(shares))

    @cached_property
    def taking_at_most_ns(self) -> dict[int, float]:
        """Rank -> what taking a batch that is there may cost it, by what most ranks take."""
        return taking_at_most_ns(self.partials)

    @cached_property
    def batches_per_step(self) -> dict[int, float]:
        """Rank -> batches that it takes from its data loader in a used step, mean over the steps."""
        return {
            rank: float(partial.loading.batches[partial.steps.indices_of(self.steps)].mean())
            for rank, partial in self.partials.items()
        }

    def takes_batches(self, rank: int) -> bool:
        """Does the rank take a batch from its data loader in every used step? Where it does not in some, those train
        on batches that the loop has kept (``itertools.cycle``), and how many samples they see is not known.
        """
        partial = self.partials[rank]
        return bool(partial.loading.batches[partial.steps.indices_of(self.steps)].all())

    @cached_property
    def workers_in_turn(self) -> int | None:
        """How many loader workers each rank has, as the batches show that ranks waited for."""
        return shown_in_turn(self.partials, self.taking_at_most_ns)

    @cached_property
    def unpaired_messages(self) -> Bool:
        """Which instances are messages with no known other end, though all ranks of their group are recorded."""
        instances = self.matched.instances
        recorded = [bool(group.ranks) and self.partials.keys() >= set(group.ranks) for group in instances.groups]
        whole = np.array(recorded or [False], dtype=np.bool_)[instances.group]
        return np.asarray(~instances.complete & whole & instances.is_kind((EXCHANGE,)))

    def self_check(self) -> None:
        """Raise ValueError where a rank's categories do not add up to its windows to the nanosecond."""
        for rank, totals in self.totals.items():
            start, end = self.windows[rank]
            if not np.array_equal(totals.sum(axis=1), end - start):
                raise ValueError(f"rank {rank}: the categories of a step do not add up to its window")
            exposed = totals[:, TimeCategory.COMM_WAIT] + totals[:, TimeCategory.COMM_TRANSFER]
            if (exposed > self.communication[rank]).any():
                raise ValueError(f"rank {rank}: more communication is exposed than there is")


def job_windows(begin_ns: Int64, end_ns: Int64, assumed_ns: Int64, aligned: Bool) -> tuple[Int64, Int64]:
    """Begin and end of each step (item) of the job, from those of all ranks (lines) on the common clock.

    The job begins a step when its last rank does, and ends it when its last rank has ended it: a rank that is early
    waits for the others. Steps that follow one another add up to the time from the first one's begin to the last one's
    end. What is only assumed of a rank's begin (``assumed_ns``) counts as far as it is of all: their steps before ended
    together. The clocks of ranks that are not ``aligned`` stand alone: of them and the others those count that take
    longest.

    Example: begins 0 and 5, ends 20 and 18 make a step from 5 to 20, though neither of the windows lasts 15.
    """
    sets = [np.flatnonzero(aligned), *np.flatnonzero(~aligned)[:, None]]
    least = begin_ns - assumed_ns
    windows = [
        (np.maximum(least[lines].max(axis=0), begin_ns[lines].min(axis=0)), end_ns[lines].max(axis=0))
        for lines in sets
        if len(lines)
    ]
    return max(windows, key=lambda window: int((window[1] - window[0]).sum()))


def align_job(
    partials: Mapping[int, RankPartial],
    first_step: int | None = None,
    hosts: Hosts | None = None,
    last_step: int | None = None,
) -> AlignedJob:
    """Put ranks that share at least one step side by side. ``partials`` must not be empty.

    ``first_step`` is the first step meant to be used, where the recording names one: earlier steps were recorded while
    the profilers of the ranks were still starting. ``hosts`` are the ranks' hosts; else the traces name them.
    ``last_step`` is the last one that ended, where known: a step marked after it was cut by the job's end.
    """
    hosts = hosts or find_hosts(partials, {}, None)
    recorded = reduce(np.intersect1d, (partial.steps.number for partial in partials.values()))
    steps = recorded[recorded >= first_step] if first_step is not None else recorded
    steps = steps[steps <= last_step] if last_step is not None else steps
    if len(steps) == 0:
        steps = recorded
    evaluated = _evaluated(partials, steps)
    if len(evaluated) <= EVALUATED_AT_MOST * len(steps):
        steps = np.setdiff1d(steps, evaluated)
    starting = _starting(partials, steps)
    steps = np.setdiff1d(steps, starting)
    matched, clocks, mismatches = match(partials, recorded, hosts.names)
    windows, timelines, totals, communication = {}, {}, {}, {}
    for rank, partial in sorted(partials.items()):
        used = partial.steps.indices_of(steps)
        start, end = partial.steps.start_ns[used], partial.steps.end_ns[used]
        waits = _waits(rank, matched)
        timeline = partial.timeline.split(TimeCategory.COMM_TRANSFER, waits, TimeCategory.COMM_WAIT)
        windows[rank], timelines[rank] = (start, end), timeline
        totals[rank] = timeline.totals(start, end)
        communication[rank] = partial.communication.within(start, end)
    result = AlignedJob(
        partials,
        steps,
        windows,
        timelines,
        totals,
        communication,
        matched.of_steps(steps),
        matched,
        clocks,
        tuple(mismatch for mismatch in mismatches if mismatch.step in steps),
        hosts,
        evaluated,
        starting,
    )
    result.self_check()
    return result


def _evaluated(partials: Mapping[int, RankPartial], steps: Int64) -> Int64:
    """Those of ``steps`` in whose host window any rank evaluated the model."""
    evaluated = np.zeros(len(steps), dtype=np.bool_)
    for partial in partials.values():
        evaluating = partial.named_host.get(EVALUATING)
        if evaluating is not None and len(evaluating) and partial.steps.marked:
            own = partial.steps.indices_of(steps)
            evaluated |= evaluating.within(partial.steps.host_start_ns[own], partial.steps.host_end_ns[own]) > 0
    return steps[evaluated]


def _starting(partials: Mapping[int, RankPartial], steps: Int64) -> Int64:
    """The first of ``steps`` where they are the job's first, and take far longer than those after them: communicators
    and libraries are made in them, and code is compiled.
    """
    windows = [(partial.steps, partial.steps.indices_of(steps)) for partial in partials.values()]
    if not all(of.marked for of, _ in windows):
        return steps[:0]
    took = np.max([of.end_ns[used] - of.start_ns[used] for of, used in windows], axis=0)
    count = 0
    while count < len(steps) - _AFTER and steps[count] <= _FIRST:
        after = took[count + 1 :]
        if took[count] < _STARTING * np.median(after) or after.max() >= _AGAIN * took[count]:
            break
        count += 1
    return steps[:count]


def time_breakdowns(result: AlignedJob) -> tuple[TimeBreakdown, ...]:
    """The time breakdown of each rank: means per step in µs."""
    rows = []
    matched = result.matched
    # Ranks with a collective whose participants are not all in the recording.
    bounded = set(distinct(matched.rank[~matched.instances.complete[matched.instance]]).tolist())
    for rank, totals in result.totals.items():
        count = len(totals)
        mean_us = totals.sum(axis=0) / count / 1e3
        communication = int(result.communication[rank].sum())
        exposed = int(totals[:, [TimeCategory.COMM_WAIT, TimeCategory.COMM_TRANSFER]].sum())
        host = result.timelines[rank].where(TimeCategory.HOST)
        start, end = result.windows[rank]
        named = {
            name: float(part.intersect(host).within(start, end).sum()) / count / 1e3
            for name, part in result.partials[rank].named_host.items()
        }
        rows.append(
            TimeBreakdown(
                rank=rank,
                step_time_us=result.mean_step_ns(rank) / 1e3,
                **{f"{row.id}_us": float(mean_us[row]) for row in TimeCategory},
                comm_us=communication / count / 1e3,
                hidden_comm_us=(communication - exposed) / count / 1e3,
                host=result.hosts.names.get(rank, ""),
                wait_is_bound=rank in bounded,
                named_host_us={name: value for name, value in named.items() if value > 0},
                own_us_per_step=tuple((np.delete(totals, TimeCategory.COMM_WAIT, axis=1).sum(axis=1) / 1e3).tolist()),
            )
        )
    return tuple(rows)


def breakdown_us_per_step(result: AlignedJob) -> dict[str, tuple[float, ...]]:
    """Each category in every used step, mean over the ranks, in µs."""
    mean_us = sum(result.totals.values(), np.zeros((len(result.steps), len(TimeCategory)))) / len(result.totals) / 1e3
    return {row.id: tuple(mean_us[:, row].tolist()) for row in TimeCategory}


def _waits(rank: int, matched: MatchedCollectives) -> Intervals:
    """When this rank waited and none of its communication was in transfer, on its own clock.

    Where collectives overlap, a moment counts as wait only if none of them has had its last arrival.
    """
    mine = matched.lines_of(rank)
    start, arrival, done = (
        matched.clocks.to_own(rank, times[mine])
        for times in (matched.start_ns, matched.last_arrival_ns, matched.done_ns)
    )
    return Intervals.of(start, arrival).subtract(Intervals.of(arrival, done))
