"""Hosts beside their devices in a form that settings can edit.

Of each op a host has a part: what it does before the op, by ``HostTime``, and the work that it launches meanwhile. Each
piece of that work has a line: the host's time up to its launch (by row), what passes until it can start, and the
device's own time from it to the op (by category). So whatever is stretched or cut, each piece still starts when it is
launched and what came before has ended.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Final

import numpy as np

from perfscope.analyzers.rank.host_lane import OF_DEVICE, HostTime
from perfscope.analyzers.rank.timeline import Progress
from perfscope.analyzers.replay.engine import Lanes
from perfscope.analyzers.replay.lanes import RankLane
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import NEVER, Float64, Int64

HOST_ROWS: Final = len(HostTime)
OWN_ROWS: Final = len(TimeCategory)
_LATENCY: Final = HOST_ROWS
OF_DEVICE_ROWS: Final = HOST_ROWS + 1
"""Columns of a piece of work: host rows, latency, and from here on device rows."""

_HOST_ROWS: Final = {
    TimeCategory.DATALOADER: (HostTime.LOADER,),
    TimeCategory.LAUNCH: (HostTime.OPERATORS,),
    TimeCategory.HOST: (HostTime.COLLECTION, HostTime.OTHER, HostTime.PAUSES),
}


@dataclass(eq=False, slots=True)
class HostPart:
    """A host's part of one op. ``lag_ns`` as in ``Lanes``; ``waited_ns`` is how long it waited there, when recorded;
    ``launches`` has a line for each piece of work.
    """

    own_ns: Float64
    launches: Float64
    lag_ns: float = 0.0
    waited_ns: float = 0.0

    @classmethod
    def none(cls) -> HostPart:
        """Nothing before an op."""
        return cls(np.zeros(HOST_ROWS), np.zeros((0, OF_DEVICE_ROWS + OWN_ROWS)))

    @classmethod
    def only_lag(cls, lag_ns: float) -> HostPart:
        """The same of an op with that lag."""
        return cls(np.zeros(HOST_ROWS), np.zeros((0, OF_DEVICE_ROWS + OWN_ROWS)), lag_ns)

    def then(self, following: HostPart, work_ns: Float64) -> HostPart:
        """Both, one after the other, as the part of the op that follows, before which the device has ``work_ns``."""
        first, second = self.launches, following.launches
        # Between messages most hosts launch nothing.
        if len(first):
            first = first.copy()
            first[:, OF_DEVICE_ROWS:] += work_ns
        if len(second):
            second = second.copy()
            second[:, :HOST_ROWS] += self.own_ns
        launches = np.concatenate((first, second)) if len(first) and len(second) else first if len(first) else second
        # Millions are made: ``replace`` takes several times as long.
        return HostPart(self.own_ns + following.own_ns, launches, following.lag_ns, following.waited_ns)

    def divided(self, left_ns: float, host_ns: float) -> tuple[HostPart, HostPart]:
        """(the part until the device has ``left_ns`` of its own left before the op, and the host has done ``host_ns``,
        or launches what comes then; the rest).
        """
        reached, left = self.launches[:, :HOST_ROWS].sum(axis=1), self.launches[:, OF_DEVICE_ROWS:].sum(axis=1)
        later = left <= left_ns + 1
        first, second = self.launches[~later], self.launches[later]
        first[:, OF_DEVICE_ROWS:] *= 1 - max(left_ns, 0.0) / left[~later, None]
        own = float(self.own_ns.sum())
        at = max(min([host_ns, own, *reached[later].tolist()]), 0.0)
        second[:, :HOST_ROWS] *= 1 - at / np.maximum(reached[later, None], 1.0)
        share = at / own if own else 0.0
        return HostPart(self.own_ns * share, first), replace(self, own_ns=self.own_ns * (1 - share), launches=second)

    def scale(self, category: TimeCategory, factor: float) -> None:
        """What belongs to a category takes ``factor`` times as long: on the host where that causes it, else on the
        device. Garbage collection is host time.
        """
        self.scale_rows(_HOST_ROWS.get(category, ()), factor)
        self.launches[:, OF_DEVICE_ROWS + category] *= factor

    def scale_rows(self, rows: Collection[HostTime], factor: float) -> None:
        """The same of things that the host does."""
        for row in rows:
            self.own_ns[row] *= factor
            self.launches[:, row] *= factor

    def set_host(self, row: HostTime, ns: float) -> None:
        """What the host does takes that long, where it did it."""
        if self.own_ns[row] > 0:
            self.scale_rows((row,), ns / self.own_ns[row])


@dataclass(frozen=True, eq=False)
class HostOfRank:
    """What a rank's ops start from, one entry per op: the device's own time (by category), its lag, the host's part.
    The host starts ``lead_ns`` before the rank. ``issuing_ns``: what issuing each of its rank ops takes the host.
    """

    work_ns: Float64
    device_lag_ns: Sequence[int]
    parts: Sequence[HostPart]
    lead_ns: int
    issuing_ns: Mapping[int, float]

    @functools.cached_property
    def usually_issuing_ns(self) -> float:
        """The median of them; 0 without any."""
        return median(self.issuing_ns.values()) if self.issuing_ns else 0.0


@dataclass(frozen=True, eq=False)
class RecordedHost:
    """A rank's ops as recorded, of which any number of ``HostOfRank`` are made to be edited. ``launches`` are those of
    all parts, one part's from its entry in ``bounds`` to the next one; the other columns have one entry per op.
    """

    work_ns: Float64
    host_ns: Float64
    launches: Float64
    bounds: Sequence[int]
    host_lag_ns: Sequence[int]
    waited_ns: Sequence[int]
    device_lag_ns: Sequence[int]
    lead_ns: int
    issuing_ns: Mapping[int, float]

    @property
    def size(self) -> int:
        """Bytes of memory."""
        return self.work_ns.nbytes + self.host_ns.nbytes + self.launches.nbytes

    def editable(self) -> HostOfRank:
        """A copy."""
        launches, begins, ends = self.launches.copy(), self.bounds[:-1], self.bounds[1:]
        columns = zip(self.host_ns.copy(), begins, ends, self.host_lag_ns, self.waited_ns, strict=True)
        parts = [HostPart(own, launches[begin:end], lag, waited) for own, begin, end, lag, waited in columns]
        return HostOfRank(self.work_ns.copy(), self.device_lag_ns, parts, self.lead_ns, self.issuing_ns)


def recorded_host(progress: Progress, side: RankLane, issuing_ns: Mapping[int, float]) -> RecordedHost:
    """That of one rank."""
    lane = progress.host
    assert lane is not None
    points, own = side.points, progress.own
    begin = np.full(len(side.done_ns), own.start_ns[0])
    worked = _of_device(own.totals(begin, side.done_ns))
    launches = np.zeros((len(points.op), OF_DEVICE_ROWS + OWN_ROWS))
    launches[:, :HOST_ROWS] = points.rows_ns
    launches[:, _LATENCY] = points.latency_ns
    done = side.done_ns[points.op + 1]
    launches[:, OF_DEVICE_ROWS:] = _of_device(own.totals(np.minimum(lane.start_ns[points.listed], done), done))
    bounds = np.searchsorted(points.op, np.arange(len(side.lanes.host_ns) + 1))
    return RecordedHost(
        work_ns=np.diff(worked, axis=0),
        host_ns=side.rows_ns.astype(np.float64),
        launches=launches,
        bounds=bounds.tolist(),
        host_lag_ns=side.lanes.host_lag_ns.tolist(),
        waited_ns=side.waited_ns.tolist(),
        device_lag_ns=side.lanes.device_lag_ns.tolist(),
        lead_ns=int(side.lanes.lead_ns[0]),
        issuing_ns=issuing_ns,
    )


def _of_device(rows: Int64) -> Float64:
    """Without what the host causes."""
    left = np.zeros(rows.shape)
    left[:, OF_DEVICE] = rows[:, OF_DEVICE]
    return left


def lanes_of(work: Sequence[Float64], lags: Sequence[float], parts: Sequence[HostPart | None], lead_ns: int) -> Lanes:
    """Lanes of one rank's ops."""
    hosts = [HostPart.none() if part is None else part for part in parts]
    return Lanes(
        host_ns=in_whole_ns([part.own_ns for part in hosts]),
        work_ns=in_whole_ns(work),
        reach_ns=_reach_ns([part.launches for part in hosts]),
        host_lag_ns=np.array([round(part.lag_ns) for part in hosts], dtype=np.int64),
        device_lag_ns=np.array([round(lag) for lag in lags], dtype=np.int64),
        hold_ns=np.empty(0, dtype=np.int64),
        lead_ns=np.array([lead_ns], dtype=np.int64),
    )


def _reach_ns(launches: Sequence[Float64]) -> Int64:
    """For each op, when the last of the pieces of work launched before it can have ended, from the op before on; NEVER
    without any.
    """
    reach = np.full(len(launches), NEVER, dtype=np.int64)
    pieces = np.array([len(of_op) for of_op in launches], dtype=np.int64)
    some = np.flatnonzero(pieces)
    if len(some):
        ends = np.concatenate(launches).sum(axis=1)
        reach[some] = np.round(np.maximum.reduceat(ends, (np.cumsum(pieces) - pieces)[some])).astype(np.int64)
    return reach


def in_whole_ns(rows: Sequence[Float64]) -> Int64:
    """Time before each op in whole ns; rounding errors do not add up."""
    # Joined and cut again: numpy takes several times as long to stack them.
    progress = np.round(np.cumsum(np.concatenate(rows).reshape(len(rows), -1).sum(axis=1) if len(rows) else []))
    return np.diff(progress, prepend=0).astype(np.int64)


def launched_anew(parts: Sequence[HostPart | None], before: Float64, after: Float64) -> list[HostPart]:
    """The work of ops that are written anew: for each new op a part that has what is launched before it, and no more.

    ``before`` and ``after`` have for each old and each new op (lines) what has passed there: device rows, then host
    rows. A piece comes before the first new op that lies behind its start.
    """
    nothing = np.zeros((0, OF_DEVICE_ROWS + OWN_ROWS))
    pieces = [nothing if part is None else part.launches for part in parts]
    every = np.concatenate([nothing, *pieces])
    number = np.repeat(np.arange(len(parts)), [len(of_part) for of_part in pieces])
    every[:, :HOST_ROWS] += np.vstack((np.zeros(HOST_ROWS), before[:-1, OWN_ROWS:]))[number]
    every[:, OF_DEVICE_ROWS:] = before[number, :OWN_ROWS] - every[:, OF_DEVICE_ROWS:]
    starts, ends = every[:, OF_DEVICE_ROWS:].sum(axis=1), after[:, :OWN_ROWS].sum(axis=1)
    place = np.minimum(np.searchsorted(ends, starts + 0.5, side="left"), len(after) - 1)
    order = np.argsort(place, kind="stable")
    every, place = every[order], place[order]
    host = np.vstack((np.zeros(HOST_ROWS), after[:, OWN_ROWS:]))
    every[:, :HOST_ROWS] -= host[place]
    every[:, OF_DEVICE_ROWS:] = np.maximum(after[place, :OWN_ROWS] - every[:, OF_DEVICE_ROWS:], 0.0)
    bounds = np.searchsorted(place, np.arange(len(after) + 1))
    return [HostPart(np.zeros(HOST_ROWS), every[bounds[at] : bounds[at + 1]]) for at in range(len(after))]
