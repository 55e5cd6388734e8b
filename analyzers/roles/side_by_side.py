"""All roles of a recording side by side: what ``Summary.roles`` holds, made of each job's own analysis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Final, Literal

import numpy as np

from perfscope.analyzers.job.identify import IdentifiedRanks
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.roles.activity import JobActivity, job_activity
from perfscope.analyzers.roles.devices import shared_devices, uses
from perfscope.analyzers.roles.waits import SideBySide, side_by_side, window
from perfscope.analyzers.roles.words import bound_role, first_action, headline
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.recording.job import RoleJob
from perfscope.recording.roles import kind_of_role, main_role
from perfscope.results.notes import note
from perfscope.results.roles.side_by_side import RoleJobRow, RoleRow, Roles, RoleTurn
from perfscope.results.rows import Verdict
from perfscope.results.summary import Summary
from perfscope.results.time_breakdown import shares

MOST_TURNS: Final = 400
"""Stretches of a role that are kept for the picture: the longest."""
_LEAST_TURN: Final = 1 / 2000
"""Shorter stretches than this share of the window cannot be seen."""
_MOST_PHASES: Final = 8

_Doing = Literal["busy", "waits", "idle", "unrecorded"]


@dataclass(frozen=True, eq=False)
class AnalyzedJob:
    """One job of a role, analyzed by itself."""

    job: RoleJob
    ranks: IdentifiedRanks
    summary: Summary

    @property
    def activity(self) -> JobActivity:
        """When it is busy."""
        return job_activity(self.job.name, self.job.role, self.ranks.partials)


def ran_together(one: AnalyzedJob, other: AnalyzedJob) -> bool:
    """Do the recordings of two jobs overlap in time?"""
    a, b = one.activity, other.activity
    return max(a.start_ns, b.start_ns) < min(a.end_ns, b.end_ns)


def with_roles(main: AnalyzedJob, jobs: Sequence[AnalyzedJob], *, stated: bool, source: str) -> Summary:
    """The summary of the main job with all roles side by side; unchanged where there is but one role."""
    if len({each.job.role for each in jobs}) < 2:
        return main.summary
    activities = [each.activity for each in jobs]
    trains = main.job.role if stated else main_role(each.job.role for each in jobs)
    side = side_by_side(activities, trains, _step_ns(main))
    rows = tuple(_row(role, jobs, activities, side) for role in side.busy)
    devices = shared_devices(
        [use for each in jobs for use in uses(each.job.role, each.ranks.partials, each.job.job.runs)], side
    )
    bound = bound_role(rows) if stated and side.together else None
    most = max(row.busy_share for row in rows)
    speedup = 1 / most if bound is not None and most > 0 else None
    iteration = side.length_ns / side.cycles / 1e3 if side.cycles else None
    roles = Roles(
        main=main.job.name,
        headline=headline(rows, together=side.together, stated=stated, devices=devices),
        bound=bound.role if bound is not None else None,
        together=side.together,
        stated=stated,
        window_us=side.length_ns / 1e3,
        start=datetime.fromtimestamp(side.start_ns / 1e9, timezone.utc).isoformat(timespec="milliseconds"),
        pause_us=side.pause_ns / 1e3,
        iterations=side.cycles,
        iteration_us=iteration,
        overlap_speedup=speedup,
        rows=rows,
        jobs=tuple(_job_row(each, activity, side) for each, activity in zip(jobs, activities, strict=True)),
        turns=tuple(_turns(side, activities)),
        devices=devices,
    )
    verdict = main.summary.verdict
    if stated and (bound is not None or not side.together):
        action = first_action(bound, speedup, source)
        verdict = Verdict(headline=roles.headline, healthy=False, first_action=action or verdict.first_action)
    notes = [note("ranks", "roles", main=main.job.name, roles=[each.job.name for each in jobs])]
    if stated and not side.together and main.job.job.runs:
        notes.append(note("ranks", "roles_apart"))
    notes += [each for each in main.summary.notes if each.kind != "further_jobs"]
    return replace(main.summary, roles=roles, verdict=verdict, notes=tuple(notes), source=source)


def _step_ns(main: AnalyzedJob) -> int:
    """A step of the main role, where its steps are marked: less than one shows no iteration."""
    steps = [partial.steps for partial in main.ranks.partials.values()]
    lengths = np.concatenate(
        [each.host_end_ns - each.host_start_ns for each in steps if each.marked] or [np.zeros(1, dtype=np.int64)]
    )
    return int(np.median(lengths))


def _row(role: str, jobs: Sequence[AnalyzedJob], activities: Sequence[JobActivity], side: SideBySide) -> RoleRow:
    mine = [each for each in jobs if each.job.role == role]
    busy = side.busy[role]
    lengths = busy.end_ns - busy.start_ns
    phases = {text: side.share(intervals) for text, intervals in _phases(role, activities).items()}
    longest = sorted((text for text in phases if phases[text] > 0), key=lambda text: -phases[text])[:_MOST_PHASES]
    return RoleRow(
        role=role,
        role_kind=kind_of_role(role),
        jobs=len(mine),
        rank_count=sum(len(each.ranks.partials) for each in mine),
        busy_share=side.share(busy),
        alone_share=side.share(side.alone(role)),
        waits={other: side.share(intervals) for other, intervals in side.waits[role].items()},
        idle_share=side.share(side.idle(role)),
        turns=len(busy),
        turn_us=float(np.median(lengths)) / 1e3 if len(lengths) else None,
        phases={text: phases[text] for text in longest},
    )


def _job_row(each: AnalyzedJob, activity: JobActivity, side: SideBySide) -> RoleJobRow:
    summary = each.summary
    first = each.job.job.sources[0].path
    return RoleJobRow(
        job=each.job.name,
        role=each.job.role,
        path=str(first.parent if len(each.job.job.sources) > 1 else first),
        ranks=summary.job.ranks,
        world_size=summary.job.world_size,
        hosts=summary.job.hosts,
        steps=len(summary.job.steps),
        step_time_us=summary.job.step_time_us if summary.job.steps else None,
        busy_share=side.share(activity.busy),
        time_breakdown=dict(shares(summary.time_breakdown)),
        headline=summary.verdict.headline,
    )


def _phases(role: str, activities: Sequence[JobActivity]) -> dict[str, Intervals]:
    """The ranges of all jobs of a role, by name."""
    pairs = grouped(item for each in activities if each.role == role for item in each.phases.items())
    return {text: Intervals.empty().union(*parts) for text, parts in pairs.items()}


def _turns(side: SideBySide, activities: Sequence[JobActivity]) -> Iterator[RoleTurn]:
    """The stretches of every role that can be seen, in order."""
    whole = window(side.start_ns, side.end_ns)
    for role, busy in side.busy.items():
        phases = _phases(role, activities)
        kinds: list[tuple[_Doing, str, Intervals]] = [("busy", "", busy), ("idle", "", side.idle(role))]
        kinds += [("waits", other, intervals) for other, intervals in side.waits[role].items()]
        kinds.append(("unrecorded", "", whole.subtract(side.recorded[role])))
        found = [
            (int(start), int(end), doing, what)
            for doing, what, intervals in kinds
            for start, end in zip(intervals.start_ns.tolist(), intervals.end_ns.tolist(), strict=True)
            if end - start >= side.length_ns * _LEAST_TURN
        ]
        for start, end, doing, what in sorted(sorted(found, key=lambda one: one[0] - one[1])[:MOST_TURNS]):
            yield RoleTurn(
                role=role,
                start_us=(start - side.start_ns) / 1e3,
                end_us=(end - side.start_ns) / 1e3,
                doing=doing,
                what=_longest(phases, start, end) if doing == "busy" else what,
            )


def _longest(phases: dict[str, Intervals], start_ns: int, end_ns: int) -> str:
    """The range that covers most of a stretch; empty where none covers a tenth of it."""
    covered = {text: intervals.intersect(window(start_ns, end_ns)).measure() for text, intervals in phases.items()}
    most = max(covered, key=lambda text: covered[text], default="")
    return most if most and covered[most] >= (end_ns - start_ns) / 10 else ""
