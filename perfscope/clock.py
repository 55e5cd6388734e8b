"""Offsets between ranks' clocks, from collectives: they end at nearly the same moment on all their participants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfscope.trace import Bool, Int64

_SWEEPS = 8
"""Rounds of refinement after the first guess; offsets settle within two or three where groups overlap well."""

_ONE_HOST_NS = 1_000_000
"""Ranks of one host read one clock; profilers calibrate theirs against it to far better than this. Estimates that
differ by less are the scatter of the collectives' ends; by more, the name does not mean one machine."""


@dataclass(frozen=True, eq=False)
class Clocks:
    """For each rank (ascending): what to add to its clock to meet the lowest rank's.

    ``residual_ns`` is the median distance of the rank's collective ends from their collective's median end after
    alignment (-1 where the rank is unaligned); ``aligned`` is False for a rank that shares no collective, directly or
    through others, with the lowest rank: it keeps its own clock.
    """

    ranks: Int64
    offset_ns: Int64
    residual_ns: Int64
    aligned: Bool

    def offset_of(self, rank: int) -> int:
        """Offset of one rank, ns."""
        return int(self.offset_ns[np.searchsorted(self.ranks, rank)])


def align(ranks: Int64, instance: Int64, rank: Int64, end_ns: Int64, hosts: Sequence[str] = ()) -> Clocks:
    """Estimate the clocks of ``ranks`` (ascending) from ends of matched collectives.

    ``hosts``, where given, names each rank's host (empty: unknown); ranks of one host get one offset.

    ``instance``, ``rank`` and ``end_ns`` have one entry for each participation: which collective, which rank, when it
    ended on that rank's own clock. Medians throughout, so that single late ends (a descheduled thread) do not count.

    Steps: walk outwards from the lowest rank, taking for each neighbour the median difference of common ends; then
    alternate between the collectives' median ends and the ranks' median distances from them. An offset within the
    residual cannot be told from zero and is taken as zero.

    Example: ends 100, 200 on rank 0 and 5100, 5204 on rank 1 give an offset of -5002 for rank 1, residual 2.
    """
    offset = np.zeros(len(ranks), dtype=np.int64)
    index = np.searchsorted(ranks, rank)
    aligned = _walk(len(ranks), instance, index, end_ns, offset)
    usable = aligned[index]
    instance, index, end_ns = instance[usable], index[usable], end_ns[usable]
    if len(end_ns):
        order = np.lexsort((index, instance))
        instance, index, end_ns = instance[order], index[order], end_ns[order]
        for _ in range(_SWEEPS):
            distance = _distance(instance, end_ns + offset[index])
            step = _median_by(index, distance, len(ranks))
            offset -= step - step[0]
            if not (step - step[0]).any():
                break
        _one_clock_a_host(offset, hosts)
        residual = _median_by(index, np.abs(_distance(instance, end_ns + offset[index])), len(ranks))
        offset[np.abs(offset) <= residual] = 0
    else:
        residual = np.zeros(len(ranks), dtype=np.int64)
    return Clocks(ranks, offset, np.where(aligned, residual, -1), aligned)


def _walk(size: int, instance: Int64, index: Int64, end_ns: Int64, offset: Int64) -> Bool:
    """First guess of ``offset`` (changed in place), outwards from rank index 0; returns which ranks were reached."""
    reached = np.zeros(size, dtype=np.bool_)
    if size == 0:
        return reached
    reached[0] = True
    while True:
        known = reached[index]
        # The time of each collective by the ranks reached so far.
        times, where = np.unique(instance[known], return_inverse=True)
        if len(times) == 0:
            return reached
        middle = _median_by(where.astype(np.int64), end_ns[known] + offset[index[known]], len(times))
        rest = np.flatnonzero(~known & np.isin(instance, times))
        if len(rest) == 0:
            return reached
        apart = middle[np.searchsorted(times, instance[rest])] - end_ns[rest]
        found = np.unique(index[rest])
        offset[found] = _median_by(np.searchsorted(found, index[rest]), apart, len(found))
        reached[found] = True


def _one_clock_a_host(offset: Int64, hosts: Sequence[str]) -> None:
    """Give the ranks of each host their median offset (in place), the lowest rank's host staying at 0."""
    for host in set(hosts) - {""}:
        members = np.flatnonzero(np.array([name == host for name in hosts]))
        if np.ptp(offset[members]) <= _ONE_HOST_NS:
            offset[members] = 0 if 0 in members else int(np.median(offset[members]))


def _distance(instance: Int64, time_ns: Int64) -> Int64:
    """Distance of each time from the median time of its instance."""
    _, where = np.unique(instance, return_inverse=True)
    where = where.astype(np.int64)
    return time_ns - _median_by(where, time_ns, int(where.max(initial=-1)) + 1)[where]


def _median_by(label: Int64, value: Int64, size: int) -> Int64:
    """Median of ``value`` for each label 0..size-1 (the mean of the middle two, rounded down); 0 for absent labels."""
    result = np.zeros(size, dtype=np.int64)
    if len(label) == 0:
        return result
    order = np.lexsort((value, label))
    label, value = label[order], value[order]
    present, first, count = np.unique(label, return_index=True, return_counts=True)
    low = value[first + (count - 1) // 2]
    high = value[first + count // 2]
    result[present] = low + (high - low) // 2
    return result
