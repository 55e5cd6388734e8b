"""Ranks' clocks set against each other, from collectives: they end at nearly the same moment on all participants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from perfscope.medians import Lines, fit_lines, median_by, middle_of
from perfscope.passages import Joints, Passages
from perfscope.trace import Bool, Float64, Int64

_SWEEPS = 8
"""Rounds of refinement after the first guess; offsets settle within two or three where groups overlap well."""

_SETTLED = 0.05
"""Refinement ends when no clock moves by more than this share of the ends' usual distance."""

_ONE_HOST_NS = 1_000_000
"""Ranks of one host read one clock; profilers calibrate theirs against it to far better than this. Estimates that
differ by less are the scatter of the collectives' ends; by more, the name does not mean one machine."""


@dataclass(frozen=True, eq=False)
class Clocks:
    """For each rank (ascending): how its clock is brought to the lowest rank's.

    ``common = own + offset + drift · (own - reference)``: ``offset_ns`` is what to add in the middle of the rank's
    recording (``reference_ns`` on its own clock), ``drift`` what to add in each ns since (0 where no trend stands out
    from the scatter; above 0 the clock runs slow). ``residual_ns`` is the median distance of the rank's collective ends
    from their collective's median end after alignment (-1 where the rank is unaligned). ``aligned`` is False for a rank
    that shares no collective, no message and no host, directly or through others, with the lowest rank: it keeps its
    own clock.
    """

    ranks: Int64
    offset_ns: Int64
    residual_ns: Int64
    aligned: Bool
    drift: Float64
    reference_ns: Int64

    def offset_of(self, rank: int) -> int:
        """Offset of one rank in the middle of its recording, ns."""
        return int(self.offset_ns[np.searchsorted(self.ranks, rank)])

    @property
    def drift_ppm(self) -> Float64:
        """What to add to each rank's clock in each second, µs."""
        return self.drift * 1e6

    @overload
    def to_common(self, rank: int | Int64, time_ns: int) -> int: ...
    @overload
    def to_common(self, rank: int | Int64, time_ns: Int64) -> Int64: ...
    def to_common(self, rank: int | Int64, time_ns: int | Int64) -> int | Int64:
        """Times on a rank's own clock as the lowest rank's clock shows them. Only moments: a duration stays its own."""
        at = np.searchsorted(self.ranks, rank)
        since = np.asarray(time_ns, dtype=np.int64) - self.reference_ns[at]
        moved = time_ns + self.offset_ns[at] + np.rint(self.drift[at] * since).astype(np.int64)
        return moved if isinstance(time_ns, np.ndarray) else int(moved)

    @overload
    def to_own(self, rank: int | Int64, time_ns: int) -> int: ...
    @overload
    def to_own(self, rank: int | Int64, time_ns: Int64) -> Int64: ...
    def to_own(self, rank: int | Int64, time_ns: int | Int64) -> int | Int64:
        """What a rank's own clock shows at these moments of the lowest rank's: ``to_common`` undone."""
        at = np.searchsorted(self.ranks, rank)
        drift, origin = self.drift[at], self.reference_ns[at] + self.offset_ns[at]
        moved = np.asarray(time_ns, dtype=np.int64) - origin
        since = np.rint(moved / (1.0 + drift)).astype(np.int64)
        # Rounding twice may end one ns beside where the time came from.
        since += moved - (since + np.rint(drift * since).astype(np.int64))
        own = since + self.reference_ns[at]
        return own if isinstance(time_ns, np.ndarray) else int(own)


def align(
    ranks: Int64,
    instance: Int64,
    rank: Int64,
    end_ns: Int64,
    hosts: Sequence[str] = (),
    passages: Passages | None = None,
) -> Clocks:
    """Estimate the clocks of ``ranks`` (ascending) from ends of matched collectives.

    ``hosts``, where given, names each rank's host (empty: unknown); ranks of one host get one offset and one drift.
    ``passages`` join ranks that no collective does.

    ``instance``, ``rank`` and ``end_ns`` have one entry for each participation: which collective, which rank, when it
    ended on that rank's own clock. Medians throughout, so that single late ends (a descheduled thread) do not count,
    nor who arrived late: that moves the end on all alike.

    Steps: walk outwards from the lowest rank, taking for each neighbour the median difference of common ends, and its
    trend where one stands out; then alternate between the collectives' median ends and the ranks' distances from them.
    An offset within the residual cannot be told from zero and is taken as zero.

    Example: ends 100, 200 on rank 0 and 5100, 5204 on rank 1 give an offset of -5002 for rank 1, residual 2.
    """
    index = np.searchsorted(ranks, rank).astype(np.int64)
    everyone = np.arange(len(ranks), dtype=np.int64)
    table = _Table(everyone, instance, index, end_ns)
    table.settle()
    units = _one_clock_a_host(table, hosts)
    if len(np.unique(units)) < len(units):
        table = _Table(units, instance, index, end_ns)
        table.settle()
    if passages is not None:
        table.join(passages, ranks)
    return table.clocks(ranks)


class _Table:
    """Ends of collectives by clock, and the estimate of each clock. Clock 0 is the one that the others are set to.

    ``unit`` is the clock that each rank reads. A part is a set of clocks that collectives tie together, and is called
    by its lowest clock, against which the others of it are settled.
    """

    def __init__(self, unit: Int64, instance: Int64, index: Int64, end_ns: Int64) -> None:
        numbers, where = np.unique(instance, return_inverse=True)
        self.unit = unit
        self.index = index
        self.size = int(unit.max(initial=-1)) + 1
        self.instances = len(numbers)
        self.instance = where.astype(np.int64)
        self.clock = unit[index]
        self.end_ns = end_ns
        self.reference = middle_of(self.clock, end_ns, self.size)
        self.since = end_ns - self.reference[self.clock]
        self.lines = Lines.flat(self.size)
        self.part = np.full(self.size, -1, dtype=np.int64)
        self.slack = np.zeros(self.size, dtype=np.int64)
        """What the messages that join a clock's part to part 0 leave open."""

    def settle(self) -> None:
        """Estimate every clock against the lowest one of its part."""
        several = np.bincount(self.instance, minlength=self.instances)[self.instance] > 1
        alone = np.setdiff1d(np.arange(self.size), self.clock[several])
        self.part[alone] = alone
        while len(left := np.flatnonzero(self.part == -1)):
            self._walk(int(left[0]))
        for _ in range(_SWEEPS):
            away = self._distance()
            step = self._against_lowest(fit_lines(self.clock, self.since, -away, self.size))
            self.lines = self.lines.plus(step)
            least = _SETTLED * float(np.median(np.abs(away))) if len(away) else 0.0
            if np.abs(step.offset).max(initial=0) <= max(1.0, least) and not step.slope.any():
                break

    def _walk(self, start: int) -> None:
        """First guess for the part of ``start``: outwards from it, each clock against those already reached."""
        self.part[start] = start
        while True:
            known = np.flatnonzero(self.part[self.clock] == start)
            touched = np.zeros(self.instances, dtype=np.bool_)
            touched[self.instance[known]] = True
            rest = np.flatnonzero(touched[self.instance] & (self.part[self.clock] != start))
            if len(rest) == 0:
                return
            times, where = np.unique(self.instance[known], return_inverse=True)
            corrected = self.end_ns[known] + self.lines.at(self.clock[known], self.since[known])
            middle = median_by(where.astype(np.int64), corrected, len(times))
            apart = middle[np.searchsorted(times, self.instance[rest])] - self.end_ns[rest]
            found = np.unique(self.clock[rest])
            label = np.searchsorted(found, self.clock[rest]).astype(np.int64)
            guess = fit_lines(label, self.since[rest], apart, len(found))
            self.lines.offset[found], self.lines.slope[found] = guess.offset, guess.slope
            self.part[found] = start

    def _distance(self) -> Int64:
        """Distance of each end from the median end of its collective."""
        time = self.end_ns + self.lines.at(self.clock, self.since)
        return time - median_by(self.instance, time, self.instances)[self.instance]

    def _against_lowest(self, step: Lines) -> Lines:
        """A step of every clock, less that of its part's lowest clock, which stays as it is."""
        middle = self.reference + self.lines.offset
        moved = step.at(self.part, middle - middle[self.part])
        return Lines(step.offset - moved, step.slope - step.slope[self.part])

    def join(self, passages: Passages, ranks: Int64) -> None:
        """Set the parts against that of clock 0 by the messages that pass between them."""
        sender = self.unit[np.searchsorted(ranks, passages.sender)]
        receiver = self.unit[np.searchsorted(ranks, passages.receiver)]
        crossing = self.part[sender] != self.part[receiver]
        sender, receiver = sender[crossing], receiver[crossing]
        tell = passages.ends_tell[crossing]
        sent = np.where(tell, passages.send_end_ns[crossing], passages.send_start_ns[crossing])
        received = passages.receipt_end_ns[crossing]
        joints = Joints(
            self.part[sender],
            self.part[receiver],
            sent + self.lines.at(sender, sent - self.reference[sender]),
            received + self.lines.at(receiver, received - self.reference[receiver]),
            tell,
            self.reference,
        )
        joints.settle()
        middle = self.reference + self.lines.offset
        moved = Lines(joints.lines.at(self.part, middle - self.reference[self.part]), joints.lines.slope[self.part])
        self.lines = self.lines.plus(moved)
        self.slack = joints.slack[self.part]
        self.part[joints.reached[self.part]] = 0

    def clocks(self, ranks: Int64) -> Clocks:
        """The estimate, rank by rank."""
        aligned = self.part[self.unit] == 0
        away = np.abs(self._distance())
        own, shared = median_by(self.index, away, len(ranks)), median_by(self.clock, away, self.size)[self.unit]
        residual = np.where(np.bincount(self.index, minlength=len(ranks)) > 0, own, shared) + self.slack[self.unit]
        offset, drift = self.lines.offset[self.unit], self.lines.slope[self.unit]
        told = aligned & ((np.abs(offset) > residual) | (drift != 0))
        return Clocks(
            ranks,
            np.where(told, offset, 0),
            np.where(aligned, residual, -1),
            aligned,
            np.where(told, drift, 0.0),
            self.reference[self.unit],
        )


def _one_clock_a_host(table: _Table, hosts: Sequence[str]) -> Int64:
    """For each rank the number of the clock that it reads, the lowest rank's being 0.

    A host's ranks read one, unless those of them that collectives tie together say otherwise.
    """
    unit = np.arange(len(table.unit), dtype=np.int64)
    names = np.array(hosts, dtype=np.str_)
    for host in set(hosts) - {""}:
        members = np.flatnonzero(names == host)
        part, offset = table.part[members], table.lines.offset[members]
        if all(np.ptp(offset[part == each]) <= _ONE_HOST_NS for each in np.unique(part)):
            unit[members] = members[0]
    return np.unique(unit, return_inverse=True)[1].astype(np.int64)
