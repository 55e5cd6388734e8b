"""One step of one rank written anew: ops taken out, put in and moved, while the own time stays where it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Final

import numpy as np

from perfscope.analyzers.rank.host_lane import HostTime
from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.analyzers.whatif.schedules.hosts import HOST_ROWS, OWN_ROWS, HostPart, launched_anew
from perfscope.analyzers.whatif.schedules.ops import RankOp, ScheduleOp, behind
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Float64

_FORWARD_HALF: Final = 1 / 6
"""Share of a micro-batch's work that half of its forward is, in which no gradient becomes ready. One bucket of each of
two micro-batches is issued after half of the work; were both of the last one, the first came after its forward."""


def but_last(reductions: Sequence[RankOp], parts: int) -> Sequence[RankOp]:
    """Of reductions of ``parts`` micro-batches, in their order, those of all but the last; none where these do not each
    reduce the same.
    """
    # Where no size is recorded, as many reductions in each micro-batch are taken for the same ones.
    sizes = [each.collective.bytes for each in reductions]
    once = len(sizes) // parts
    return reductions[:-once] if once and sizes == sizes[:once] * parts else ()


class StepOps:
    """The ops of one rank in one step, and those around them that issue its collectives: a host that runs ahead of its
    device issues some before the device begins the step. ``begins`` is the place of the op that begins the step.

    ``progress_ns`` is the rank's own time passed at each op, counted from before that one; new ops are placed by it.
    ``ends_ns`` is that of the step's last op; ``whole``: of the op that starts the next step, with all own time of
    this one.
    """

    def __init__(self, schedules: EditableSchedules, rank: int, step: int, *, whole: bool = False) -> None:
        self._schedules, self.rank, self.step = schedules, rank, step
        every = schedules.ops[rank]
        inside = [place for place, op in enumerate(every) if op.step == step] or [0]
        issued = [place for place, op in enumerate(every) if _belongs(op.issued, step)]
        first, last = inside[0], min(inside[-1] + whole, len(every) - 1)
        self._bounds = (min([first, *issued]), max([last, *issued]) + 1)
        self.ops: list[ScheduleOp] = every[slice(*self._bounds)]
        self.begins = first - self._bounds[0]
        rows = np.zeros((len(self.ops), OWN_ROWS + HOST_ROWS))
        # Joined and cut again: numpy takes several times as long to stack them.
        rows[:, :OWN_ROWS] = np.concatenate([op.own_ns for op in self.ops]).reshape(-1, OWN_ROWS)
        if schedules.hosts:
            nothing = np.zeros(HOST_ROWS)
            hosts = [nothing if op.host is None else op.host.own_ns for op in self.ops]
            rows[:, OWN_ROWS:] = np.concatenate(hosts).reshape(-1, HOST_ROWS)
        self._rows = np.cumsum(rows, axis=0)
        passed = self._rows[:, :OWN_ROWS].sum(axis=1)
        self._before = float(passed[self.begins - 1]) if self.begins else 0.0
        self.progress_ns: Float64 = passed - self._before
        self.ends_ns = float(self.progress_ns[last - self._bounds[0]])

    def issues(self, *kinds: str) -> dict[int, RankOp]:
        """Place in ``ops`` -> the rank op issued there: the step's of these kinds that move parameters or gradients."""
        issued = ((place, op.issued) for place, op in enumerate(self.ops))
        return {
            place: rank_op
            for place, rank_op in issued
            if rank_op is not None and _belongs(rank_op, self.step) and rank_op.moves(*kinds)
        }

    def places(self, kind: OpKind, rank_ops: set[RankOp]) -> list[int]:
        """Places in ``ops`` of those that issue ``rank_ops``, or wait for them."""
        return [place for place, op in enumerate(self.ops) if op.kind is kind and op.rank_op in rank_ops]

    def in_every_part(self, rank_ops: set[RankOp], parts: int) -> bool:
        """Are these issued all through the ``parts`` micro-batches of the step's work, not in the last one only?"""
        worked = self.progress_ns - self._rows[:, TimeCategory.DATALOADER]
        issues = self.places(OpKind.ISSUE, rank_ops)
        first, last, begin = (float(worked[place]) for place in (issues[0], issues[-1], self.begins))
        return parts > 1 and first < begin + (last - begin) * (parts - 1 + _FORWARD_HALF) / parts

    def before_last(self, reductions: Sequence[RankOp], parts: int) -> Sequence[RankOp]:
        """Of the step's reductions, in their order, those of all its ``parts`` micro-batches but the last; none where
        these do not each reduce the same.
        """
        return but_last(reductions, parts) if self.in_every_part(set(reductions), parts) else ()

    def replace(self, dropped: frozenset[RankOp], added: Sequence[tuple[float, ScheduleOp]]) -> None:
        """Take the ops of the rank ops ``dropped`` out and put ``added`` in at their progress; the own time stays.

        At the same progress the ops that were there come first, then those added, in their order.
        """
        gone = {place for place, op in enumerate(self.ops) if op.rank_op is not None and op.rank_op in dropped}
        self._spare(gone)
        left = [
            (float(at), rows, op)
            for place, (at, rows, op) in enumerate(zip(self.progress_ns, self._rows, self.ops, strict=True))
            if place not in gone
        ]
        rows = self._rows_at(np.array([at for at, _ in added], dtype=np.float64))
        left += [(at, passed, op) for (at, op), passed in zip(added, rows, strict=True)]
        left.sort(key=lambda item: item[0])
        self._write([(passed, op) for _, passed, op in left], {id(op) for _, op in added})

    def move(self, behind: Mapping[int, int]) -> None:
        """Move ops (by their place in ``ops``) to right behind others; those moved to one place stay in order. What
        issuing them takes the host moves with them.
        """
        self._spare(behind)
        order = sorted(range(len(self.ops)), key=lambda place: (behind.get(place, place), place in behind, place))
        moved = {id(self.ops[place]) for place in behind}
        self._write([(self._rows[behind.get(place, place)], self.ops[place]) for place in order], moved)

    def _spare(self, places: Iterable[int]) -> None:
        """The host does not issue there."""
        for place in places:
            self._rows[place:, OWN_ROWS + HostTime.OPERATORS] -= self._schedules.issuing_ns(self.ops[place])
        self._rows = np.maximum.accumulate(self._rows)

    def _write(self, items: Sequence[tuple[Float64, ScheduleOp]], issued_here: Set[int]) -> None:
        """Write the step anew: ops in order, each with what has passed there. ``issued_here``: ids of those that the
        host did not issue there before.
        """
        # What was left after the last op comes before the next step's first.
        passed = np.maximum.accumulate(np.vstack([*(rows for rows, _ in items), self._rows[-1]]))
        own = np.diff(passed, axis=0, prepend=0.0)
        hosts: Sequence[HostPart | None] = [None] * len(own)
        if self._schedules.hosts:
            hosts = launched = launched_anew([op.host for op in self.ops], self._rows, passed)
            for host, rows in zip(launched, own, strict=True):
                host.own_ns = rows[OWN_ROWS:]
        written = [_timed(op, rows, host) for (_, op), rows, host in zip(items, own, hosts, strict=False)]
        for (_, before), op in zip(items, written, strict=True):
            if id(before) in issued_here:
                op.spend(self._schedules.issuing_ns(before))
        ops = self._schedules.ops[self.rank]
        ops[slice(*self._bounds)] = written
        following = self._bounds[0] + len(written)
        if own[-1].any() and following < len(ops):
            rest = ScheduleOp(OpKind.MARK, own[-1, :OWN_ROWS], host=hosts[-1])
            ops[following] = behind(rest, ops[following])

    def _rows_at(self, progress_ns: Float64) -> Float64:
        """Own time passed at each moment of the progress (lines), by category (columns): linear between the ops."""
        points = np.concatenate(([-self._before], self.progress_ns))
        rows = np.concatenate((np.zeros((1, self._rows.shape[1])), self._rows))
        after = np.clip(np.searchsorted(points, progress_ns, side="left"), 1, len(points) - 1)
        length = points[after] - points[after - 1]
        share = np.divide(progress_ns - points[after - 1], length, out=np.ones_like(length), where=length > 0)
        share = np.clip(share, 0.0, 1.0)[:, None]
        return np.asarray(rows[after - 1] + share * (rows[after] - rows[after - 1]), dtype=np.float64)


def every_step(schedules: EditableSchedules, *, whole: bool = False) -> Iterator[StepOps]:
    """Every step of every rank; its ops are read when it is its turn."""
    for rank, ops in schedules.ops.items():
        for step in sorted({op.step for op in ops if op.step is not None}):
            yield StepOps(schedules, rank, step, whole=whole)


def _belongs(rank_op: RankOp | None, step: int) -> bool:
    """Is it part of a collective of this step?"""
    return rank_op is not None and rank_op.collective.step == step


def _timed(op: ScheduleOp, rows: Float64, host: HostPart | None) -> ScheduleOp:
    """``op`` with other time before it: ``rows`` of its own, and what ``host``, made for it alone, does."""
    if host is not None and op.host is not None:
        host.lag_ns, host.waited_ns = op.host.lag_ns, op.host.waited_ns
    return op.with_time(rows[:OWN_ROWS], host)
