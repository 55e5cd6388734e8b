"""One typical step as pictures, on aligned clocks.

Step timelines show the time breakdown of up to 64 ranks; lanes show the events of a few ranks: device, communication,
host and data loader side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import multimode
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.blocks import us
from perfscope.analyzers.rank.lanes import MOST_EVENTS
from perfscope.analyzers.rank.partial import LaneEvents, RankLanes
from perfscope.results.categories import TimeCategory
from perfscope.results.rows import StepTimeline
from perfscope.results.tables import Lane
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Int32, Int64

MOST_RANKS: Final = 8
"""Ranks in the picture: each takes several lanes."""

MAX_RANKS: Final = 64
"""More ranks cannot be distinguished in one picture."""
RESOLUTION: Final = 1200
"""Intervals shorter than the step over this are merged: about a pixel of a wide screen."""
_OUTSIDE: Final = "Python or other host code, outside operators"


def lanes(result: AlignedJob, wanted: Sequence[int] = ()) -> tuple[Lane, ...]:
    """Lanes of one step, by rank: of those ``wanted``, the slowest, and an even choice of the others.

    Ranks that recorded other steps than most are left out.
    """
    recorded = {rank: partial.lanes for rank, partial in result.partials.items() if partial.lanes.lanes}
    if not recorded:
        return ()
    step = multimode(own.step for own in recorded.values())[0]
    recorded = {rank: own for rank, own in recorded.items() if own.step == step}
    chosen = chosen_ranks(sorted(recorded), (*wanted, result.last), MOST_RANKS)
    begin = {rank: int(result.clocks.to_common(rank, recorded[rank].start_ns)) for rank in chosen}
    zero = min(begin.values())
    number = step if all(result.partials[rank].steps.marked for rank in chosen) else None
    chosen_lanes: list[Lane] = []
    for rank in chosen:
        own, shift = recorded[rank], begin[rank] - recorded[rank].start_ns - zero
        mine = {lane.kind: _lane(rank, number, own, lane, shift) for lane in own.lanes}
        collectives = _communication(result, rank, number, own, zero)
        if collectives is not None:
            mine["communication"] = collectives
        if "host" not in mine and not result.partials[rank].has_device_work:
            mine |= _outside_operators(result, rank, number, own, shift)
        order = ("phase", "compute", "communication", "copy", "host", "backward", "loader", "range")
        chosen_lanes += [mine[kind] for kind in order if kind in mine]
    return tuple(chosen_lanes)


def _lane(rank: int, step: int | None, own: RankLanes, lane: LaneEvents, shift: int) -> Lane:
    return Lane(
        rank=rank,
        step=step,
        kind=lane.kind,
        start_us=us(lane.start_ns + shift),
        duration_us=us(lane.end_ns - lane.start_ns),
        texts=own.texts,
        name=_places(lane.name),
        operator=_places(lane.operator),
        events=tuple(lane.pieces.tolist()),
        busy_us=us(lane.busy_ns),
    )


def _outside_operators(result: AlignedJob, rank: int, step: int | None, own: RankLanes, shift: int) -> dict[str, Lane]:
    """The host time of a rank without device, as in the time breakdown: Python and other code outside operators."""
    timeline = result.timelines[rank]
    chosen = (timeline.category == TimeCategory.HOST) & (timeline.ends_ns > own.start_ns)
    chosen &= timeline.start_ns < own.end_ns
    start = np.maximum(timeline.start_ns[chosen], own.start_ns)
    end = np.minimum(timeline.ends_ns[chosen], own.end_ns)
    long = np.flatnonzero(end - start >= (own.end_ns - own.start_ns) // RESOLUTION)
    start, end = start[long], end[long]
    longest = np.sort(np.argsort(start - end, kind="stable")[:MOST_EVENTS])
    start, end = start[longest], end[longest]
    if len(start) == 0:
        return {}
    return {
        "host": Lane(
            rank=rank,
            step=step,
            kind="host",
            start_us=us(start + shift),
            duration_us=us(end - start),
            texts=(_OUTSIDE,),
            name=(0,) * len(start),
            operator=(None,) * len(start),
            events=(1,) * len(start),
            busy_us=us(end - start),
        )
    }


def _communication(result: AlignedJob, rank: int, step: int | None, own: RankLanes, zero: int) -> Lane | None:
    """The rank's collectives of that step, the longest where there are many; None without."""
    matched = result.matched_before
    lines = matched.lines_of(rank)
    begin, end = (int(result.clocks.to_common(rank, edge)) for edge in (own.start_ns, own.end_ns))
    lines = lines[(matched.end_ns[lines] > begin) & (matched.start_ns[lines] < end)]
    if len(lines) == 0:
        return None
    length = matched.end_ns[lines] - matched.start_ns[lines]
    lines = lines[np.sort(np.argsort(-length, kind="stable")[:MOST_EVENTS])]
    lines = lines[np.argsort(matched.start_ns[lines], kind="stable")]
    # What began before the step's window or ends after it is cut, as in the time breakdown.
    start, last, done = (
        np.clip(times[lines], begin, end) for times in (matched.start_ns, matched.last_arrival_ns, matched.end_ns)
    )
    instance = matched.instance[lines]
    instances = matched.instances
    groups = [instances.groups[group].name or "unnamed" for group in instances.group[instance].tolist()]
    kinds = [instances.kinds[kind] for kind in instances.kind[instance].tolist()]
    texts = tuple(dict.fromkeys((*kinds, *groups)))
    sizes = instances.bytes[instance].tolist()
    # With no other rank in the recording, wait and transfer cannot be separated.
    waits = np.where(instances.participants[instance] > 1, last - start, NONE).tolist()
    return Lane(
        rank=rank,
        step=step,
        kind="communication",
        start_us=us(start - zero),
        duration_us=us(done - start),
        texts=texts,
        name=tuple(texts.index(kind) for kind in kinds),
        operator=(None,) * len(lines),
        events=(1,) * len(lines),
        busy_us=us(done - start),
        group=tuple(texts.index(group) for group in groups),
        bytes=tuple(size if size >= 0 else None for size in sizes),
        wait_us=tuple(wait / 1e3 if wait != NONE else None for wait in waits),
        waited_for=_places(matched.waited_for[lines]),
    )


def _places(places: Int32 | Int64) -> tuple[int | None, ...]:
    return tuple(None if place == NONE else place for place in places.tolist())


def typical_step(result: AlignedJob) -> int:
    """Index of the step that the lanes show; of the median one where that is not used."""
    laned = np.flatnonzero(result.steps == next(iter(result.partials.values())).lanes.step)
    if len(laned):
        return int(laned[0])
    longest = np.max([end - start for start, end in result.windows.values()], axis=0)
    return int(np.argsort(longest, kind="stable")[len(longest) // 2])


def step_timelines(result: AlignedJob, wanted: Sequence[int] = ()) -> tuple[StepTimeline, ...]:
    """The typical step, aligned; of more than ``MAX_RANKS`` ranks those ``wanted`` and an even choice of the others."""
    index = typical_step(result)
    ranks = sorted(result.partials)
    ranks = chosen_ranks(ranks, wanted, MAX_RANKS)
    begin = {rank: int(result.windows[rank][0][index]) for rank in ranks}
    aligned = {rank: result.clocks.to_common(rank, begin[rank]) for rank in ranks}
    zero = min(aligned.values())
    marked = all(result.partials[rank].steps.marked for rank in ranks)
    number = int(result.steps[index]) if marked else None
    return tuple(_step_timeline(result, rank, index, number, aligned[rank] - begin[rank] - zero) for rank in ranks)


def chosen_ranks(ranks: Sequence[int], wanted: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of ``ranks``, ascending: those ``wanted`` (the first of them), the others evenly spread."""
    if len(ranks) <= most:
        return sorted(ranks)
    known = set(ranks)
    first = list(dict.fromkeys(rank for rank in wanted if rank in known))[: most // 2]
    others = [rank for rank in sorted(ranks) if rank not in set(first)]
    even = np.linspace(0, len(others) - 1, most - len(first))
    return sorted((*first, *(others[round(position)] for position in even)))


def _step_timeline(result: AlignedJob, rank: int, index: int, number: int | None, shift: int) -> StepTimeline:
    begin, end = (int(edge[index]) for edge in result.windows[rank])
    timeline = result.timelines[rank]
    inside = (timeline.ends_ns > begin) & (timeline.start_ns < end)
    start = np.maximum(timeline.start_ns[inside], begin)
    row = timeline.category[inside].astype(np.int64)
    start, row = merge_short(start, row, end, (end - begin) // RESOLUTION)
    duration = np.diff(np.append(start, end))
    return StepTimeline(
        rank=rank,
        step=number,
        categories=tuple(TimeCategory(value).id for value in row.tolist()),
        start_us=us(start + shift),
        duration_us=us(duration),
    )


def merge_short(start_ns: Int64, row: Int64, end_ns: int, least_ns: int) -> tuple[Int64, Int64]:
    """Cut the window into cells of ``least_ns`` and give each cell the category that fills most of it.

    Returns starts and categories of the intervals that remain. With ``least_ns`` 0 nothing is merged.
    """
    if least_ns <= 0 or len(start_ns) == 0:
        return start_ns, row
    begin = int(start_ns[0])
    edges = np.arange(begin, end_ns, least_ns, dtype=np.int64)
    points = distinct(np.concatenate((edges, start_ns)))
    length = np.diff(np.append(points, end_ns))
    owner = row[np.searchsorted(start_ns, points, side="right") - 1]
    cell = np.searchsorted(edges, points, side="right") - 1
    filled = np.zeros((len(edges), len(TimeCategory)), dtype=np.int64)
    np.add.at(filled, (cell, owner), length)
    label = filled.argmax(axis=1)
    changes = np.concatenate(([True], label[1:] != label[:-1]))
    return edges[changes], label[changes]
