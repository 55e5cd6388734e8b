"""Sets the ranks' clocks against each other.

Collectives end at nearly the same moment on all their ranks, so the ends show how far the clocks are apart (``align``).
Ranks that no collective ties together are set by their sends and recvs: a message cannot arrive before it was sent,
which bounds the offset between the two clocks (``ClockConstraints``). Where these do not name their peers, their rhythm
shows it (``rhythm``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np

from perfscope.frozen import dataclass
from perfscope.trace.distinct import distinct
from perfscope.trace.medians import Lines, fit_lines, median_by, middle_of
from perfscope.trace.message_kernels import MessageKernels
from perfscope.trace.rhythm import OpenEnds, offset_between
from perfscope.trace.trace import Bool, Float64, Int64

_SWEEPS = 8
"""Rounds of refinement after the first guess; offsets settle within two or three where groups overlap well."""

_SETTLED = 0.05
"""Refinement ends when no clock moves by more than this share of the ends' usual distance."""

_ONE_HOST_NS = 1_000_000
"""Ranks of one host read one clock; profilers calibrate theirs against it to far better than this. Estimates that
differ by less are the scatter of the collectives' ends; by more, the name does not mean one machine."""

_ALMOST_ALL = 90
"""Percentile that stands for an extreme of many differences, so that one wrong timestamp does not."""


@dataclass(frozen=True, eq=False)
class Clocks:
    """For each rank (ascending): how to convert its clock to the lowest rank's.

    ``common = own + offset + drift · (own - reference)``: ``offset_ns`` is what to add in the middle of the rank's
    recording (``reference_ns`` on its own clock), ``drift`` what to add per ns since (0 where no trend stands out from
    the scatter; above 0 the clock runs slow). ``residual_ns`` is the median distance of the rank's collective ends
    from their collective's median end after alignment (-1 where the rank is unaligned). ``aligned`` is False for a rank
    that shares no collective, no message and no host, directly or through others, with the lowest rank: its times stay
    as they are. Ranks of one ``cluster`` (the number of one of their clocks) are set against each other; 0 is that of
    the lowest rank.
    """

    ranks: Int64
    offset_ns: Int64
    residual_ns: Int64
    aligned: Bool
    drift: Float64
    reference_ns: Int64
    cluster: Int64

    def offset_of(self, rank: int) -> int:
        """Offset of one rank in the middle of its recording, ns."""
        return int(self.offset_ns[np.searchsorted(self.ranks, rank)])

    @property
    def drift_ppm(self) -> Float64:
        """What to add to each rank's clock per second, µs."""
        return self.drift * 1e6

    @overload
    def to_common(self, rank: int | Int64, time_ns: int) -> int: ...
    @overload
    def to_common(self, rank: int | Int64, time_ns: Int64) -> Int64: ...
    def to_common(self, rank: int | Int64, time_ns: int | Int64) -> int | Int64:
        """Convert moments on a rank's own clock to the lowest rank's clock. Durations need no conversion."""
        at = np.searchsorted(self.ranks, rank)
        since = np.asarray(time_ns, dtype=np.int64) - self.reference_ns[at]
        moved = time_ns + self.offset_ns[at] + np.rint(self.drift[at] * since).astype(np.int64)
        return moved if isinstance(time_ns, np.ndarray) else int(moved)

    def of_rank(self, rank: int) -> RankClock:
        """The clock of one rank."""
        at = int(np.searchsorted(self.ranks, rank))
        return RankClock(int(self.offset_ns[at]), float(self.drift[at]), int(self.reference_ns[at]))

    @overload
    def to_own(self, rank: int | Int64, time_ns: int) -> int: ...
    @overload
    def to_own(self, rank: int | Int64, time_ns: Int64) -> Int64: ...
    def to_own(self, rank: int | Int64, time_ns: int | Int64) -> int | Int64:
        """Convert moments on the lowest rank's clock to a rank's own clock: the inverse of ``to_common``."""
        at = np.searchsorted(self.ranks, rank)
        drift, origin = self.drift[at], self.reference_ns[at] + self.offset_ns[at]
        moved = np.asarray(time_ns, dtype=np.int64) - origin
        since = np.rint(moved / (1.0 + drift)).astype(np.int64)
        # Rounding twice may end one ns beside where the time came from.
        since += moved - (since + np.rint(drift * since).astype(np.int64))
        own = since + self.reference_ns[at]
        return own if isinstance(time_ns, np.ndarray) else int(own)


class RankClock(NamedTuple):
    """One rank's clock, for single moments: the same results as ``Clocks``', at a tenth of the time."""

    offset_ns: int
    drift: float
    reference_ns: int

    def to_common(self, time_ns: int) -> int:
        """A moment on this clock, on the lowest rank's."""
        return time_ns + self.offset_ns + round(self.drift * (time_ns - self.reference_ns))

    def to_own(self, time_ns: int) -> int:
        """A moment on the lowest rank's clock, on this one."""
        moved = time_ns - self.reference_ns - self.offset_ns
        since = round(moved / (1.0 + self.drift))
        since += moved - (since + round(self.drift * since))
        return since + self.reference_ns


@dataclass(frozen=True, eq=False)
class SendRecvTimes:
    """Matched sends and recvs, each on its own rank's clock: parallel arrays.

    ``recv_ends_with_send`` where the recv ends as soon as the message is sent. A device's kernels do so, unless the
    message fits into a buffer; a host's range ends when the program asks for the message. ``kernels`` are the numbers
    of the two kernels of each message (0 to n - 1), where one may carry several: it ends with the last of them.
    """

    sender: Int64
    receiver: Int64
    send_start_ns: Int64
    send_end_ns: Int64
    recv_end_ns: Int64
    recv_ends_with_send: Bool
    recv_start_ns: Int64 | None = None
    kernels: tuple[Int64, Int64] | None = None


def align(
    ranks: Int64,
    instance: Int64,
    rank: Int64,
    end_ns: Int64,
    hosts: Sequence[str] = (),
    messages: SendRecvTimes | None = None,
    open_ends: OpenEnds | None = None,
) -> Clocks:
    """Estimate the clocks of ``ranks`` (ascending) from the ends of matched collectives.

    ``instance``, ``rank`` and ``end_ns`` have one entry per rank op: which collective, which rank, when it ended on
    that rank's own clock. ``hosts``, where given, names each rank's host (empty: unknown); ranks of one host get one
    offset and one drift. ``messages`` connect ranks that no collective connects; ``open_ends`` those that not even
    messages connect with the lowest rank, one host further.

    Medians throughout, so that single late ends (a descheduled thread) do not count. Late arrivals do not count either:
    they move the end on all ranks alike.

    First guess: walk outwards from the lowest rank, taking for each neighbour the median difference of common ends, and
    its trend where one stands out. Then alternate between the collectives' median ends and the ranks' distances from
    them. An offset within the residual cannot be distinguished from zero and is set to zero.

    Example: ends 100, 200 on rank 0 and 5100, 5204 on rank 1 give an offset of -5002 for rank 1, residual 2.
    """
    index = np.searchsorted(ranks, rank).astype(np.int64)
    everyone = np.arange(len(ranks), dtype=np.int64)
    fit = _ClockFit(everyone, instance, index, end_ns)
    fit.settle()
    units = _one_clock_per_host(fit, hosts)
    if len(distinct(units)) < len(units):
        fit = _ClockFit(units, instance, index, end_ns)
        fit.settle()
    if messages is not None:
        fit.connect(messages, ranks)
    if open_ends is not None and len(open_ends):
        fit.connect_by_rhythm(open_ends, ranks)
    return fit.clocks(ranks)


class _ClockFit:
    """Ends of collectives by clock, and the estimate of each clock. Clock 0 is the one that the others are set to.

    ``unit`` is the number of the clock that each rank reads. A cluster is a set of clocks that collectives tie
    together; it has the number of its lowest clock, against which its other clocks are set.
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
        self.cluster = np.full(self.size, -1, dtype=np.int64)
        self.slack = np.zeros(self.size, dtype=np.int64)
        """How much the messages between a clock's cluster and cluster 0 leave open."""

    def settle(self) -> None:
        """Estimate every clock against the lowest one of its cluster."""
        several = np.bincount(self.instance, minlength=self.instances)[self.instance] > 1
        alone = np.setdiff1d(np.arange(self.size), self.clock[several])
        self.cluster[alone] = alone
        while len(left := np.flatnonzero(self.cluster == -1)):
            self._walk(int(left[0]))
        for _ in range(_SWEEPS):
            away = self._distance()
            step = self._against_lowest(fit_lines(self.clock, self.since, -away, self.size))
            self.lines = self.lines.plus(step)
            least = _SETTLED * float(np.median(np.abs(away))) if len(away) else 0.0
            if np.abs(step.offset).max(initial=0) <= max(1.0, least) and not step.slope.any():
                break

    def _walk(self, start: int) -> None:
        """First guess for the cluster of ``start``: outwards from it, each clock against those already reached."""
        self.cluster[start] = start
        while True:
            known = np.flatnonzero(self.cluster[self.clock] == start)
            touched = np.zeros(self.instances, dtype=np.bool_)
            touched[self.instance[known]] = True
            rest = np.flatnonzero(touched[self.instance] & (self.cluster[self.clock] != start))
            if len(rest) == 0:
                return
            times, where = np.unique(self.instance[known], return_inverse=True)
            corrected = self.end_ns[known] + self.lines.at(self.clock[known], self.since[known])
            middle = median_by(where.astype(np.int64), corrected, len(times))
            apart = middle[np.searchsorted(times, self.instance[rest])] - self.end_ns[rest]
            reached = distinct(self.clock[rest])
            label = np.searchsorted(reached, self.clock[rest]).astype(np.int64)
            guess = fit_lines(label, self.since[rest], apart, len(reached))
            self.lines.offset[reached], self.lines.slope[reached] = guess.offset, guess.slope
            self.cluster[reached] = start

    def _distance(self) -> Int64:
        """Distance of each end from the median end of its collective."""
        time = self.end_ns + self.lines.at(self.clock, self.since)
        return time - median_by(self.instance, time, self.instances)[self.instance]

    def _against_lowest(self, step: Lines) -> Lines:
        """The change of every clock, less that of its cluster's lowest clock, which stays as it is."""
        middle = self.reference + self.lines.offset
        moved = step.at(self.cluster, middle - middle[self.cluster])
        return Lines(step.offset - moved, step.slope - step.slope[self.cluster])

    def connect(self, messages: SendRecvTimes, ranks: Int64) -> None:
        """Set the clusters against that of clock 0 by the messages between them."""
        sender = self.unit[np.searchsorted(ranks, messages.sender)]
        receiver = self.unit[np.searchsorted(ranks, messages.receiver)]
        ends_with_send = messages.recv_ends_with_send
        sent = np.where(ends_with_send, messages.send_end_ns, messages.send_start_ns)
        if messages.kernels is None or messages.recv_start_ns is None:
            self._connect(sender, receiver, sent, messages.recv_end_ns, ends_with_send)
            return
        on_host, (senders, receivers) = ~ends_with_send, messages.kernels
        of_host = sender[on_host], receiver[on_host], sent[on_host], messages.recv_end_ns[on_host]
        ends = MessageKernels(
            senders[ends_with_send],
            receivers[ends_with_send],
            _each_kernel(messages.kernels, sender, receiver),
            _each_kernel(messages.kernels, messages.send_start_ns, messages.recv_start_ns),
            _each_kernel(messages.kernels, messages.send_end_ns, messages.recv_end_ns),
        )
        while self._connect_together(ends, of_host) or self._connect_apart(ends):
            pass

    def _connect_together(self, ends: MessageKernels, of_host: tuple[Int64, Int64, Int64, Int64]) -> bool:
        """By kernels that both end with the message between them, and by messages of hosts."""
        last = self._last(ends)
        both = last[ends.sender] & last[ends.receiver]
        one, other = ends.sender[both], ends.receiver[both]
        on_device = ends.clock[one], ends.clock[other], ends.end_ns[one], ends.end_ns[other]
        sender, receiver, sent, received = (np.append(*pair) for pair in zip(on_device, of_host, strict=True))
        return self._connect(sender, receiver, sent, received, np.arange(len(sender)) < len(one))

    def _connect_apart(self, ends: MessageKernels) -> bool:
        """By the least that is sure: one kernel of a message ends no sooner than the other, where that ends with the
        message; and a recv no sooner than the message takes from the send's start on.
        """
        one, other = np.append(ends.sender, ends.receiver), np.append(ends.receiver, ends.sender)
        last = self._last(ends)[one]
        sooner, later = np.append(one[last], ends.sender), np.append(other[last], ends.receiver)
        since = np.append(ends.end_ns[one[last]], ends.start_ns[ends.sender] + ends.least_ns())
        exactly = np.zeros(len(since), dtype=np.bool_)
        return self._connect(ends.clock[sooner], ends.clock[later], since, ends.end_ns[later], exactly)

    def _last(self, ends: MessageKernels) -> Bool:
        end = ends.end_ns + self.lines.at(ends.clock, ends.end_ns - self.reference[ends.clock])
        return ends.last(self.cluster[ends.clock], end)

    def _connect(self, sender: Int64, receiver: Int64, sent: Int64, received: Int64, ends_with_send: Bool) -> bool:
        """Set clusters against that of clock 0 by messages, of which clocks and times are given; is there any?"""
        crossing = self.cluster[sender] != self.cluster[receiver]
        sender, receiver = sender[crossing], receiver[crossing]
        sent, received = sent[crossing], received[crossing]
        constraints = ClockConstraints(
            self.cluster[sender],
            self.cluster[receiver],
            sent + self.lines.at(sender, sent - self.reference[sender]),
            received + self.lines.at(receiver, received - self.reference[receiver]),
            ends_with_send[crossing],
            self.reference,
        )
        constraints.solve()
        middle = self.reference + self.lines.offset
        lines = constraints.lines
        moved = Lines(lines.at(self.cluster, middle - self.reference[self.cluster]), lines.slope[self.cluster])
        self.lines = self.lines.plus(moved)
        found = constraints.reached[self.cluster] & (self.cluster != 0)
        self.slack = np.where(found, constraints.slack[self.cluster], self.slack)
        self.cluster[found] = 0
        return bool(found.any())

    def connect_by_rhythm(self, ends: OpenEnds, ranks: Int64) -> None:
        """Set those of the clusters that are left against that of clock 0 that messages without peers tie to it."""
        clock = self.unit[np.searchsorted(ranks, ends.rank)]
        cluster = self.cluster[clock]
        time = ends.end_ns + self.lines.at(clock, ends.end_ns - self.reference[clock])
        for other in distinct(cluster[cluster != 0]).tolist():
            offset = offset_between(ends, cluster == 0, cluster == other, time)
            if offset is not None:
                members = self.cluster == other
                self.lines.offset[members] += offset
                self.cluster[members] = 0

    def clocks(self, ranks: Int64) -> Clocks:
        """The estimate, rank by rank."""
        aligned = self.cluster[self.unit] == 0
        away = np.abs(self._distance())
        own, shared = median_by(self.index, away, len(ranks)), median_by(self.clock, away, self.size)[self.unit]
        residual = np.where(np.bincount(self.index, minlength=len(ranks)) > 0, own, shared) + self.slack[self.unit]
        offset, drift = self.lines.offset[self.unit], self.lines.slope[self.unit]
        differs = aligned & ((np.abs(offset) > residual) | (drift != 0))
        return Clocks(
            ranks,
            np.where(differs, offset, 0),
            np.where(aligned, residual, -1),
            aligned,
            np.where(differs, drift, 0.0),
            self.reference[self.unit],
            self.cluster[self.unit],
        )


def _one_clock_per_host(fit: _ClockFit, hosts: Sequence[str]) -> Int64:
    """For each rank the number of the clock that it reads, the lowest rank's being 0.

    All ranks of a host read one clock, unless collectives between them show otherwise.
    """
    unit = np.arange(len(fit.unit), dtype=np.int64)
    names = np.array(hosts, dtype=np.str_)
    for host in set(hosts) - {""}:
        members = np.flatnonzero(names == host)
        cluster, offset = fit.cluster[members], fit.lines.offset[members]
        if all(np.ptp(offset[cluster == each]) <= _ONE_HOST_NS for each in distinct(cluster)):
            unit[members] = members[0]
    return np.unique(unit, return_inverse=True)[1].astype(np.int64)


def _each_kernel(kernels: tuple[Int64, Int64], of_send: Int64, of_recv: Int64) -> Int64:
    """What the messages at their two ends say of each kernel."""
    size = max(int(side.max(initial=-1)) for side in kernels) + 1
    values = np.zeros(size, dtype=np.int64)
    for numbers, of_end in zip(kernels, (of_send, of_recv), strict=True):
        values[numbers] = of_end
    return values


class ClockConstraints:
    """Messages between clusters of clocks, and the offset that each cluster needs to agree with cluster 0.

    Times are on the clusters' own clocks. Messages to a cluster limit how far its clock can be set back, messages from
    it how far forward. Where a recv ends as soon as its message is sent, the two limits meet; the estimate lies between
    them.
    """

    def __init__(
        self, sender: Int64, receiver: Int64, sent_ns: Int64, received_ns: Int64, ends_with_send: Bool, reference: Int64
    ) -> None:
        self._sides = (sender, sent_ns), (receiver, received_ns)
        self._ends_with_send = ends_with_send
        self._reference = reference
        self.lines = Lines.flat(len(reference))
        self.slack = np.zeros(len(reference), dtype=np.int64)
        """How much the limits leave open."""
        self.reached = np.zeros(len(reference), dtype=np.bool_)

    def solve(self) -> None:
        """Walk outwards from cluster 0."""
        self.reached[:1] = True
        (sender, _), (receiver, _) = self._sides
        while True:
            out = self.reached[sender] & ~self.reached[receiver]
            back = self.reached[receiver] & ~self.reached[sender]
            neighbours = distinct(np.concatenate((receiver[out], sender[back])))
            if len(neighbours) == 0:
                return
            for cluster in neighbours.tolist():
                self._set(cluster, out & (receiver == cluster), back & (sender == cluster))
            self.reached[neighbours] = True

    def _set(self, cluster: int, to: Bool, fro: Bool) -> None:
        """Estimate one cluster by the messages to it and from it."""
        there, here = self._moved(0, to), self._moved(1, fro)
        own = self._sides[1][1][to], self._sides[0][1][fro]
        since = tuple(times - self._reference[cluster] for times in own)
        apart = there - own[0], here - own[1]
        if self._ends_with_send[to | fro].all():
            alike = np.zeros(int(to.sum() + fro.sum()), dtype=np.int64)
            line = fit_lines(alike, np.concatenate(since), np.concatenate(apart), 1)
            self.lines.slope[cluster] = line.slope[0]
        level = [
            values - np.rint(self.lines.slope[cluster] * times).astype(np.int64)
            for values, times in zip(apart, since, strict=True)
        ]
        limits = [
            float(np.percentile(values, share))
            for values, share in zip(level, (_ALMOST_ALL, 100 - _ALMOST_ALL), strict=True)
            if len(values)
        ]
        estimate = sum(limits) / len(limits)
        off = (
            np.abs(np.array(limits) - estimate)
            if len(limits) == 2
            else np.abs(np.concatenate(level).astype(np.float64) - estimate)
        )
        self.lines.offset[cluster], self.slack[cluster] = round(estimate), round(float(np.median(off)))

    def _moved(self, side: int, which: Bool) -> Int64:
        """Times of one side of these messages on the clock of cluster 0."""
        cluster, times = (column[which] for column in self._sides[side])
        return times + self.lines.at(cluster, times - self._reference[cluster])
