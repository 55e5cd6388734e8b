"""One op of one rank, and the rank's part in a collective (a rank op)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import field, replace

import numpy as np

from perfscope.analyzers.rank.collectives.collectives import SMALLEST
from perfscope.analyzers.rank.host_lane import HostTime
from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.whatif.schedules.hosts import OF_DEVICE_ROWS, HostPart
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import NEVER, NONE, Float64


@dataclass(eq=False, slots=True)
class Collective:
    """A collective or message of ``size`` ranks. ``bytes`` as in ``Collectives`` (None: not known); ``whole``: all
    its ranks are recorded; else ``floor_ns`` is the last recorded arrival; ``mostly``: all or most of them are.
    """

    kind: str
    group: int
    bytes: int | None
    size: int
    step: int | None
    dtype: str | None = None
    whole: bool = True
    mostly: bool = True
    floor_ns: int = NEVER
    between: bool = False
    """Every rank issues it between the optimizer's step and the next forward."""
    of_loop: bool = False
    """The training loop calls it for itself (``job.collectives.of_loop``)."""
    returned: bool = False
    """A gradient that is reduced to one rank, or broadcast back (``job.collectives.returned``)."""
    chained: Mapping[int, Set[int]] = field(default_factory=dict)
    """As in ``Schedules``."""
    instance: int = NONE
    """Its number among the matched ones of all recorded steps; NONE for what a setting adds."""


@dataclass(eq=False, slots=True)
class RankOp:
    """One rank's part in a collective: on which ``lane`` (stream) of the rank, how long after it could start it did
    (``gap_ns``), how much later than the recorded ranks others seem to have come (``late_ns``), and how long it took
    from then on (``transfer_ns``).
    """

    rank: int
    collective: Collective
    lane: int
    gap_ns: float = 0.0
    transfer_ns: float = 0.0
    late_ns: float = 0.0
    backward: bool = False
    """Issued by autograd, as far as that is recorded."""
    after_backward: bool = False
    """Issued between the last of autograd's functions and the optimizer's step, as far as these are recorded."""
    again: bool = False
    """Issued in a forward that runs again in the backward."""
    of_layer: bool = False
    """A layer computes with it: no gradients of parameters."""
    of_norm: bool = False
    """That layer is a synchronized batch normalization."""
    after: RankOp | None = None
    """The rank op of another stream whose end it waits for as well: its ``gap_ns`` includes that."""
    after_gap_ns: float = 0.0
    """From that end to its start."""
    sends: bool | None = None
    """Is it a message that this rank sends, or receives; None: not known, both, or no message."""
    host_ns: float | None = None
    """What issuing it takes the host; None: as long as it usually does."""

    @property
    def bytes(self) -> int:
        """Of its collective; 0 where not known."""
        return self.collective.bytes or 0

    def moves(self, *kinds: str) -> bool:
        """Is it of one of these kinds, and moves parameters or gradients?"""
        return self.collective.kind in kinds and self.bytes >= SMALLEST and not self.of_layer


@dataclass(eq=False, slots=True)
class ScheduleOp:
    """One op: the rank's own time before it by category (ns), and what it then does.

    ``rank_op`` is set where ``kind`` is ISSUE, WAIT or JOIN, ``mark`` where MARK, SYNC, LIMIT or NOTE, ``hold_ns``
    where HOLD. Beside a ``host``, own time and ``lag_ns`` are the device's alone.
    """

    kind: OpKind
    own_ns: Float64
    lag_ns: float = 0.0
    rank_op: RankOp | None = None
    mark: int = NONE
    hold_ns: int = NEVER
    doubtful: bool = False
    """A HOLD for a delivery of which it is not sure that its moment is fixed."""
    step: int | None = None
    """The job's step number in which this happens; None before the first."""
    host: HostPart | None = None
    """What the host does before it; None where that is part of the rank's own time, or nothing."""

    def scale(self, category: TimeCategory, factor: float) -> None:
        """The time before it that belongs to a category takes ``factor`` times as long."""
        self.own_ns[category] *= factor
        if self.host is not None:
            self.host.scale(category, factor)

    def scale_device(self, factor: float) -> None:
        """All of the device's own time before it takes ``factor`` times as long."""
        self.own_ns = self.own_ns * factor
        if self.host is not None:
            self.host.launches[:, OF_DEVICE_ROWS:] *= factor

    def add(self, category: TimeCategory, ns: float) -> None:
        """There is that much more of the device's own time before it."""
        self.own_ns[category] += ns
        if self.host is not None:
            self.host.launches[:, OF_DEVICE_ROWS + category] += ns

    def spend(self, ns: float) -> None:
        """The host's operators take that much more (negative: less) before it."""
        if self.host is not None:
            self.host.own_ns[HostTime.OPERATORS] = max(float(self.host.own_ns[HostTime.OPERATORS]) + ns, 0.0)

    def hold(self, until_ns: int, lag_ns: float) -> None:
        """A HOLD is until then, with that lag."""
        self.hold_ns = until_ns
        if self.host is None:
            self.lag_ns = lag_ns
        else:
            self.host.lag_ns = lag_ns

    def divided(self, left_ns: float, host_ns: float) -> tuple[ScheduleOp, ScheduleOp]:
        """(the time before it until the device has ``left_ns`` of its own left, and the host has done ``host_ns``; the
        op with the rest of its time). The first is a MARK of nothing.
        """
        own = float(self.own_ns.sum())
        share = min(max(left_ns / own, 0.0), 1.0) if own else 0.0
        before = ScheduleOp(OpKind.MARK, self.own_ns * (1 - share), step=self.step)
        behind = replace(self, own_ns=self.own_ns * share)
        if self.host is not None:
            before.host, behind.host = self.host.divided(left_ns, host_ns)
        return before, behind

    def with_time(self, own_ns: Float64, host: HostPart | None) -> ScheduleOp:
        """The same op with other time before it. Millions are made: ``replace`` takes several times as long."""
        return ScheduleOp(
            self.kind, own_ns, self.lag_ns, self.rank_op, self.mark, self.hold_ns, self.doubtful, self.step, host
        )

    @property
    def issued(self) -> RankOp | None:
        """The rank op that it issues; None where it does something else."""
        return self.rank_op if self.kind is OpKind.ISSUE else None

    @classmethod
    def of(cls, kind: OpKind, rank_op: RankOp, step: int | None, lag_ns: float = 0.0) -> ScheduleOp:
        """An op without own time before it, which issues a rank op or waits for it."""
        return cls(kind, np.zeros(len(TimeCategory)), lag_ns, rank_op, step=step)


def without(
    ops: Sequence[ScheduleOp], rank_ops: Set[RankOp], kind: OpKind | None = None
) -> tuple[list[ScheduleOp], Float64]:
    """(ops without those of ``rank_ops``, own time after the last of them); ``kind``: only their issues, or waits. The
    own time before an op that is taken out comes before the next one.
    """
    return left_out(ops, lambda op: op.rank_op in rank_ops and kind in (None, op.kind))


def left_out(ops: Sequence[ScheduleOp], gone: Callable[[ScheduleOp], bool]) -> tuple[list[ScheduleOp], Float64]:
    """The same without those that are ``gone``."""
    left: list[ScheduleOp] = []
    carried: ScheduleOp | None = None
    for op in ops:
        joined = op if carried is None else behind(carried, op)
        if gone(op):
            carried = joined
        else:
            left.append(joined)
            carried = None
    return left, np.zeros(len(TimeCategory)) if carried is None else carried.own_ns


def waits_on_device(op: ScheduleOp) -> ScheduleOp:
    """A JOIN as a WAIT: the device waits for the collective, and the host goes on."""
    return replace(op, kind=OpKind.WAIT, lag_ns=0.0, host=None if op.host is None else replace(op.host, lag_ns=NEVER))


def behind(first: ScheduleOp, op: ScheduleOp) -> ScheduleOp:
    """``op`` with the time before ``first`` in front of its own."""
    host = op.host
    if first.host is not None or host is not None:
        host = (first.host or HostPart.none()).then(host or HostPart.none(), op.own_ns)
    return op.with_time(first.own_ns + op.own_ns, host)
