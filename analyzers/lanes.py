"""One step's timeline of the most telling ranks: device, communication, host and loader side by side, aligned."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import multimode
from typing import Final

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.rank_lanes import MOST_EVENTS, LaneEvents, RankLanes
from perfscope.analyzers.strips import chosen_ranks
from perfscope.summary_tables import Lane
from perfscope.trace import NONE, Int32, Int64

MOST_RANKS: Final = 8
"""Ranks in the picture: each takes several lanes."""


def lanes(result: Comparison, wanted: Sequence[int] = ()) -> tuple[Lane, ...]:
    """Lanes of one step, by rank: of those ``wanted``, the slowest, and an even choice of the others.

    Ranks that recorded other steps than most are left out.
    """
    recorded = {rank: partial.lanes for rank, partial in result.partials.items() if partial.lanes.lanes}
    if not recorded:
        return ()
    step = multimode(own.step for own in recorded.values())[0]
    recorded = {rank: own for rank, own in recorded.items() if own.step == step}
    chosen = chosen_ranks(sorted(recorded), (*wanted, result.slowest), MOST_RANKS)
    begin = {rank: int(result.clocks.to_common(rank, recorded[rank].start_ns)) for rank in chosen}
    zero = min(begin.values())
    number = step if all(result.partials[rank].steps.marked for rank in chosen) else None
    found: list[Lane] = []
    for rank in chosen:
        own, shift = recorded[rank], begin[rank] - recorded[rank].start_ns - zero
        mine = {lane.kind: _lane(rank, number, own, lane, shift) for lane in own.lanes}
        collectives = _communication(result, rank, number, own, zero)
        if collectives is not None:
            mine["communication"] = collectives
        order = ("compute", "communication", "copy", "host", "backward", "loader")
        found += [mine[kind] for kind in order if kind in mine]
    return tuple(found)


def _lane(rank: int, step: int | None, own: RankLanes, lane: LaneEvents, shift: int) -> Lane:
    return Lane(
        rank=rank,
        step=step,
        kind=lane.kind,
        start_us=_us(lane.start_ns + shift),
        duration_us=_us(lane.end_ns - lane.start_ns),
        texts=own.texts,
        name=_places(lane.name),
        operator=_places(lane.operator),
        pieces=tuple(lane.pieces.tolist()),
        busy_us=_us(lane.busy_ns),
    )


def _communication(result: Comparison, rank: int, step: int | None, own: RankLanes, zero: int) -> Lane | None:
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
    # What began before the step's window or ends after it is cut, as in the account.
    start, last, done = (
        np.clip(times[lines], begin, end) for times in (matched.start_ns, matched.last_arrival_ns, matched.end_ns)
    )
    instance = matched.instance[lines]
    instances = matched.instances
    groups = [instances.groups[group].name or "unnamed" for group in instances.group[instance].tolist()]
    kinds = [instances.kinds[kind] for kind in instances.kind[instance].tolist()]
    texts = tuple(dict.fromkeys((*kinds, *groups)))
    sizes = instances.bytes[instance].tolist()
    # Alone in the recording, a rank cannot tell waiting from transfer.
    waits = np.where(instances.participants[instance] > 1, last - start, NONE).tolist()
    return Lane(
        rank=rank,
        step=step,
        kind="communication",
        start_us=_us(start - zero),
        duration_us=_us(done - start),
        texts=texts,
        name=tuple(texts.index(kind) for kind in kinds),
        operator=(None,) * len(lines),
        pieces=(1,) * len(lines),
        busy_us=_us(done - start),
        group=tuple(texts.index(group) for group in groups),
        bytes=tuple(size if size >= 0 else None for size in sizes),
        wait_us=tuple(wait / 1e3 if wait != NONE else None for wait in waits),
    )


def _us(times_ns: Int64) -> tuple[float, ...]:
    return tuple((times_ns / 1e3).tolist())


def _places(places: Int32) -> tuple[int | None, ...]:
    return tuple(None if place == NONE else place for place in places.tolist())
