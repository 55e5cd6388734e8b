"""Tools about time: where each rank's step went, who waits for whom, and single steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean, median
from typing import Annotated, Final

from pydantic import Field

from perfscope.errors import UnusableInput
from perfscope.results.categories import CATEGORIES, EXPOSED_COMMUNICATION
from perfscope.results.rows import StragglerRow
from perfscope.results.summary import Summary
from perfscope.results.time_breakdown import shares
from perfscope.server.answers import (
    AboutRecording,
    Answer,
    BreakdownHead,
    RankOfStep,
    RankShare,
    StepHead,
    StepRow,
    StragglersHead,
)
from perfscope.server.opened import state_of
from perfscope.server.tool import Capture, OrderBy, RecordingName, Tools, table_answer, tool
from perfscope.text import rank_list

_MOST_RANKS: Final = 8
"""Ranks that a head lists."""


class RankTools(Tools):
    """Ranks and steps."""

    @tool("Where each rank's step went", BreakdownHead, "time_breakdown")
    def time_breakdown(
        self,
        recording: RecordingName,
        rank: Annotated[int | None, Field(ge=0, description="Only this rank.")] = None,
        order_by: OrderBy = None,
        capture: Capture = None,
    ) -> Answer:
        """Account for the step time: compute, waiting for late ranks, exposed transfers, copies, data loading and the
        other kinds of idle time. The ten categories add up to the step, for each rank and for the mean over all.

        Use it for "where does the time go", "how much communication is exposed", "how idle is the device". With
        order_by="-exposed_comm_wait_us" the ranks that wait most come first; with "exposed_comm_wait_us" those that
        the others wait for.
        """
        place, found = self.opened(recording, capture)
        breakdowns = found.time_breakdown
        if rank is not None and rank not in (known := [row.rank for row in breakdowns]):
            raise UnusableInput(f"rank {rank} is not in the recording; it has ranks {rank_list(known)}")
        head = BreakdownHead(
            recording=place.name,
            notes=() if breakdowns else ("The recording has no traces, so there is no time breakdown.",),
            step_time_us=found.job.step_time_us,
            mean_us={name: _mean(row.categories()[name] for row in breakdowns) for name in CATEGORIES},
            shares=(taken := shares(breakdowns)),
            exposed_communication=math.fsum(taken[name] for name in EXPOSED_COMMUNICATION),
            overlapped_communication=_overlapped(found),
        )
        where = None if rank is None else {"rank": rank}
        return table_answer(head, place, found, "time_breakdown", where=where, order_by=order_by)

    @tool("Who waits for whom", StragglersHead, StragglerRow)
    def stragglers(self, recording: RecordingName, capture: Capture = None) -> Answer:
        """List the stragglers: ranks, hosts or pipeline stages that the others wait for, each with its cause, the step
        time that it costs, and in which steps. Beside them: which ranks came last most often, and which waited most.

        Use it for "which rank is slow, and why". A rank that waits much is not slow: it waits for one that is. No row
        means that no rank's delay costs a share of the step worth naming.
        """
        place, found = self.opened(recording, capture)
        head = StragglersHead(
            recording=place.name,
            notes=() if found.stragglers else ("No straggler: the ranks do not wait for a slow one.",),
            step_time_us=found.job.step_time_us,
            came_last=_came_last(found),
            waited_most=_waited_most(found),
        )
        return Answer(fixed=head, rows=found.stragglers, state=state_of(place))

    @tool("The recorded steps", AboutRecording, StepRow)
    def steps(
        self,
        recording: RecordingName,
        slowest_first: Annotated[bool, Field(description="Longest steps first; else in their order.")] = False,
        capture: Capture = None,
    ) -> Answer:
        """List the recorded steps of the job with the time of each and its categories.

        Use it for "do steps vary", "which step was slow"; then ask step about that one. Steps of the whole run, also
        those that were not recorded, are in history.
        """
        place, found = self.opened(recording, capture)
        rows = _steps(found)
        if slowest_first:
            rows = sorted(rows, key=lambda row: -row.step_time_us)
        notes = () if rows else ("Nothing marks steps: the whole recording is analyzed as one window.",)
        return Answer(fixed=AboutRecording(recording=place.name, notes=notes), rows=rows, state=state_of(place))

    @tool("One recorded step", StepHead, RankOfStep)
    def step(
        self,
        recording: RecordingName,
        step: Annotated[int, Field(description="Number of the step, as steps gives it.")],
        capture: Capture = None,
    ) -> Answer:
        """Look into one recorded step: its time and categories beside the mean of all steps, the ranks that delayed
        the job in it, and each rank's own time, the longest first.

        Use it for "why was step N slow".
        """
        place, found = self.opened(recording, capture)
        rows = {row.step: row for row in _steps(found)}
        if step not in rows:
            there = rank_list(rows) or "none: nothing marks steps"
            raise UnusableInput(f"step {step} is not among the recorded steps; there are {there}")
        this, at = rows[step], list(rows).index(step)
        means = {name: _mean(values) for name, values in found.job.time_breakdown_us_per_step.items()}
        head = StepHead(
            recording=place.name,
            step=step,
            step_time_us=this.step_time_us,
            over_median=this.over_median,
            categories_us=this.categories_us,
            beyond_mean_us={name: us - means[name] for name, us in this.categories_us.items()},
            late_ranks=tuple(sorted({rank for row in found.stragglers if step in row.steps for rank in row.members})),
        )
        own = {
            row.rank: row.own_us_per_step[at] for row in found.time_breakdown if len(row.own_us_per_step) == len(rows)
        }
        typical = median(own.values()) if own else 0.0
        ranks = [
            RankOfStep(rank=rank, own_us=us, over_median=us / typical if typical > 0 else 1.0)
            for rank, us in sorted(own.items(), key=lambda item: -item[1])
        ]
        return Answer(fixed=head, rows=ranks, state=state_of(place))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0


def _overlapped(found: Summary) -> float | None:
    comm = math.fsum(row.comm_us for row in found.time_breakdown)
    return math.fsum(row.hidden_comm_us for row in found.time_breakdown) / comm if comm > 0 else None


def _came_last(found: Summary) -> tuple[RankShare, ...]:
    """Share of all instances with a known last arriver in which each rank was it."""
    last: defaultdict[int, float] = defaultdict(float)
    for row in found.collectives:
        for rank, share in row.last_arriver.items():
            last[rank] += share * row.count
    total = math.fsum(last.values())
    most = sorted(last.items(), key=lambda each: (-each[1], each[0]))[:_MOST_RANKS]
    return tuple(RankShare(rank=rank, share=count / total) for rank, count in most if count > 0)


def _waited_most(found: Summary) -> tuple[RankShare, ...]:
    waits = sorted(
        ((row.share("exposed_comm_wait"), row.rank) for row in found.time_breakdown),
        key=lambda each: (-each[0], each[1]),
    )
    return tuple(RankShare(rank=rank, share=share) for share, rank in waits[:_MOST_RANKS] if share > 0)


def _steps(found: Summary) -> list[StepRow]:
    job = found.job
    times = job.step_time_us_per_step
    if len(times) != len(job.steps) or not times:
        return []
    typical = median(times)
    return [
        StepRow(
            step=number,
            step_time_us=us,
            over_median=us / typical if typical > 0 else 1.0,
            categories_us={name: values[at] for name, values in job.time_breakdown_us_per_step.items()},
        )
        for at, (number, us) in enumerate(zip(job.steps, times, strict=True))
    ]
