"""The ranks side by side: common steps, aligned clocks, waits split from transfers, the account of every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Final

import numpy as np

from perfscope.analyzers.collectives.matching import Matched, Mismatch, match
from perfscope.analyzers.host_activity import EVALUATING
from perfscope.analyzers.hosts import Hosts, find_hosts
from perfscope.analyzers.intervals import Intervals
from perfscope.analyzers.rank import RankPartial
from perfscope.analyzers.steps import Steps
from perfscope.analyzers.timeline import Row, Timeline
from perfscope.clock import Clocks
from perfscope.summary import AccountRow
from perfscope.trace import Int64

EVALUATED_AT_MOST: Final = 0.5
"""Share of steps with an evaluation up to which they are left out: an evaluation now and then is no part of training,
one in most steps is how this job trains (reinforcement learning, say)."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """All ranks compared. ``steps`` are the job's step numbers that every rank has; ``windows`` are each rank's own.

    ``totals`` holds, for each rank, ns of each row (columns) in each used step (lines); lines add up to the windows.
    """

    partials: Mapping[int, RankPartial]
    steps: Int64
    windows: Mapping[int, tuple[Int64, Int64]]
    """Rank -> starts and ends of its used windows, own clock, ns."""
    timelines: Mapping[int, Timeline]
    totals: Mapping[int, Int64]
    communication: Mapping[int, Int64]
    """Rank -> ns of communication, hidden or not, in each used step."""
    matched: Matched
    """Collectives of the used steps."""
    matched_before: Matched
    """Those, and the ones of recorded steps before the first used one."""
    clocks: Clocks
    mismatches: tuple[Mismatch, ...]
    hosts: Hosts
    evaluated: Int64
    """Steps in which some rank evaluated the model: left out of ``steps``, unless most are such."""

    def mean_step_ns(self, rank: int) -> float:
        """Mean window of one rank."""
        start, end = self.windows[rank]
        return float((end - start).sum()) / len(start)

    @property
    def slowest(self) -> int:
        """The rank with the longest mean window (the lowest among equals)."""
        return max(self.partials, key=lambda rank: (self.mean_step_ns(rank), -rank))

    @property
    def step_ns(self) -> float:
        """Job step time: the mean advance per step of the slowest rank's window."""
        return self.mean_step_ns(self.slowest)

    def self_check(self) -> None:
        """Raise ValueError where a rank's rows do not add up to its windows to the nanosecond."""
        for rank, totals in self.totals.items():
            start, end = self.windows[rank]
            if not np.array_equal(totals.sum(axis=1), end - start):
                raise ValueError(f"rank {rank}: the rows of a step do not add up to its window")
            exposed = totals[:, Row.COMM_WAIT] + totals[:, Row.COMM_TRANSFER]
            if (exposed > self.communication[rank]).any():
                raise ValueError(f"rank {rank}: more communication is exposed than there is")


def compare(
    partials: Mapping[int, RankPartial],
    first_step: int | None = None,
    hosts: Hosts | None = None,
    last_step: int | None = None,
) -> Comparison:
    """Compare ranks that share at least one step. ``partials`` must not be empty.

    ``first_step`` is the first step meant to be used, where the recorder says so: those before it were recorded while
    the profilers of the ranks were still starting. ``hosts`` are the ranks' hosts; else the traces' own word counts.
    ``last_step`` is the last one that ended, where that is known: what is marked beyond was cut by the job's end.
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
    matched, clocks, mismatches = match(partials, recorded, hosts.names)
    windows, timelines, totals, communication = {}, {}, {}, {}
    for rank, partial in sorted(partials.items()):
        start, end = _windows(partial.steps, steps)
        waits = _waits(rank, matched)
        timeline = partial.timeline.split(Row.COMM_TRANSFER, waits, Row.COMM_WAIT)
        windows[rank], timelines[rank] = (start, end), timeline
        totals[rank] = timeline.totals(start, end)
        communication[rank] = partial.communication.within(start, end)
    result = Comparison(
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
    )
    result.self_check()
    return result


def _evaluated(partials: Mapping[int, RankPartial], steps: Int64) -> Int64:
    """Those of ``steps`` in whose host window any rank evaluated the model."""
    found = np.zeros(len(steps), dtype=np.bool_)
    for partial in partials.values():
        evaluating = partial.named_host.get(EVALUATING)
        if evaluating is not None and len(evaluating) and partial.steps.marked:
            own = partial.steps.indices_of(steps)
            found |= evaluating.within(partial.steps.host_start_ns[own], partial.steps.host_end_ns[own]) > 0
    return steps[found]


def account_rows(result: Comparison) -> tuple[AccountRow, ...]:
    """The account as the summary shows it: means per step in µs."""
    rows = []
    bounded = _bounded_ranks(result.matched)
    for rank, totals in result.totals.items():
        count = len(totals)
        mean_us = totals.sum(axis=0) / count / 1e3
        communication = int(result.communication[rank].sum())
        exposed = int(totals[:, [Row.COMM_WAIT, Row.COMM_TRANSFER]].sum())
        host = result.timelines[rank].where(Row.HOST)
        start, end = result.windows[rank]
        named = {
            name: float(part.intersect(host).within(start, end).sum()) / count / 1e3
            for name, part in result.partials[rank].named_host.items()
        }
        rows.append(
            AccountRow(
                rank=rank,
                step_time_us=result.mean_step_ns(rank) / 1e3,
                **{f"{row.label}_us": float(mean_us[row]) for row in Row},
                comm_us=communication / count / 1e3,
                hidden_comm_us=(communication - exposed) / count / 1e3,
                host=result.hosts.names.get(rank, ""),
                wait_is_bound=rank in bounded,
                named_host_us={name: value for name, value in named.items() if value > 0},
                own_us_per_step=tuple((np.delete(totals, Row.COMM_WAIT, axis=1).sum(axis=1) / 1e3).tolist()),
            )
        )
    return tuple(rows)


def account_per_step(result: Comparison) -> dict[str, tuple[float, ...]]:
    """Each row of the account in every used step, mean over the ranks, in µs."""
    mean_us = sum(result.totals.values(), np.zeros((len(result.steps), len(Row)))) / len(result.totals) / 1e3
    return {row.label: tuple(mean_us[:, row].tolist()) for row in Row}


def _windows(own: Steps, steps: Int64) -> tuple[Int64, Int64]:
    chosen = own.indices_of(steps)
    return own.start_ns[chosen], own.end_ns[chosen]


def _waits(rank: int, matched: Matched) -> Intervals:
    """When this rank waited and nothing of its communication moved, on its own clock.

    Where collectives overlap, a moment counts as wait only if none of them is past its last arrival.
    """
    mine = matched.lines_of(rank)
    start, arrival, done = (
        matched.clocks.to_own(rank, times[mine])
        for times in (matched.start_ns, matched.last_arrival_ns, matched.done_ns)
    )
    return Intervals.of(start, arrival).subtract(Intervals.of(arrival, done))


def _bounded_ranks(matched: Matched) -> set[int]:
    """Ranks with a collective whose participants are not all in the recording."""
    return {int(rank) for rank in np.unique(matched.rank[~matched.instances.complete[matched.instance]])}
