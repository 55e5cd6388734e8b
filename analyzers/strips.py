"""One typical step of every rank as a strip of stretches, for a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.timeline import Row
from perfscope.summary import Strip
from perfscope.trace import Int64

MAX_RANKS: Final = 64
"""Strips beyond this many ranks cannot be told apart in one picture."""
RESOLUTION: Final = 1200
"""Stretches shorter than the step over this are merged: about a pixel of a wide screen."""


ALIKE: Final = 0.05
"""A step this close to the median is as typical as the median one."""


def typical_step(result: Comparison) -> int:
    """Index of the used step that the lanes show where its longest window is typical, else of the median one."""
    longest = np.max([end - start for start, end in result.windows.values()], axis=0)
    median = int(np.argsort(longest, kind="stable")[len(longest) // 2])
    laned = np.flatnonzero(result.steps == next(iter(result.partials.values())).lanes.step)
    if len(laned) and abs(longest[laned[0]] / longest[median] - 1) <= ALIKE:
        return int(laned[0])
    return median


def strips(result: Comparison, wanted: Sequence[int] = ()) -> tuple[Strip, ...]:
    """Strips of the typical step, aligned; of many ranks those ``wanted`` and an even choice, ``MAX_RANKS`` at most."""
    index = typical_step(result)
    ranks = sorted(result.partials)
    ranks = chosen_ranks(ranks, wanted, MAX_RANKS)
    begin = {rank: int(result.windows[rank][0][index]) for rank in ranks}
    aligned = {rank: result.clocks.to_common(rank, begin[rank]) for rank in ranks}
    zero = min(aligned.values())
    marked = all(result.partials[rank].steps.marked for rank in ranks)
    number = int(result.steps[index]) if marked else None
    return tuple(_strip(result, rank, index, number, aligned[rank] - begin[rank] - zero) for rank in ranks)


def chosen_ranks(ranks: Sequence[int], wanted: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of ``ranks``, ascending: those ``wanted`` (the first of them), the others evenly spread."""
    if len(ranks) <= most:
        return sorted(ranks)
    known = set(ranks)
    first = list(dict.fromkeys(rank for rank in wanted if rank in known))[: most // 2]
    others = [rank for rank in sorted(ranks) if rank not in set(first)]
    even = np.linspace(0, len(others) - 1, most - len(first))
    return sorted((*first, *(others[round(position)] for position in even)))


def _strip(result: Comparison, rank: int, index: int, number: int | None, shift: int) -> Strip:
    begin, end = (int(edge[index]) for edge in result.windows[rank])
    timeline = result.timelines[rank]
    inside = (timeline.ends_ns > begin) & (timeline.start_ns < end)
    start = np.maximum(timeline.start_ns[inside], begin)
    row = timeline.row[inside].astype(np.int64)
    start, row = merge_short(start, row, end, (end - begin) // RESOLUTION)
    duration = np.diff(np.append(start, end))
    return Strip(
        rank=rank,
        step=number,
        categories=tuple(Row(int(value)).label for value in row),
        start_us=tuple(float(value) for value in (start + shift) / 1e3),
        duration_us=tuple(float(value) for value in duration / 1e3),
    )


def merge_short(start_ns: Int64, row: Int64, end_ns: int, least_ns: int) -> tuple[Int64, Int64]:
    """Cut the window into cells of ``least_ns`` and give each cell the row that fills most of it.

    Returns starts and rows of the stretches that remain. With ``least_ns`` 0 nothing is merged.
    """
    if least_ns <= 0 or len(start_ns) == 0:
        return start_ns, row
    begin = int(start_ns[0])
    edges = np.arange(begin, end_ns, least_ns, dtype=np.int64)
    points = np.unique(np.concatenate((edges, start_ns)))
    length = np.diff(np.append(points, end_ns))
    owner = row[np.searchsorted(start_ns, points, side="right") - 1]
    cell = np.searchsorted(edges, points, side="right") - 1
    filled = np.zeros((len(edges), len(Row)), dtype=np.int64)
    np.add.at(filled, (cell, owner), length)
    label = filled.argmax(axis=1)
    changes = np.concatenate(([True], label[1:] != label[:-1]))
    return edges[changes], label[changes]
