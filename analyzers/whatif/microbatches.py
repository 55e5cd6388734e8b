"""More or fewer micro-batches in a pipeline, for the same batch.

The recorded schedule of each stage is divided at its messages (``stage_schedules``). Between two exchanges are passes;
their own time and collectives (tensor parallelism) serve as models for the passes of the new schedule. With m'
micro-batches instead of m each pass takes m/m' of its time, but for what its kernels take to start, and each message
has m/m' of its bytes; what the host spends on a pass or a message stays. What comes before the first pass and after the
last (loading, reductions, the optimizer) stays too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

from perfscope.analyzers.rank.host_lane import OF_HOST
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.analyzers.replay.engine import OpKind, replay
from perfscope.analyzers.replay.schedules import RecordedSchedules
from perfscope.analyzers.whatif.change import CannotReplay, Context, Setting, Uncertainty, whole_number
from perfscope.analyzers.whatif.pipeline_turns import Hop, Turn, Work, turns
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.analyzers.whatif.schedules.hosts import OF_DEVICE_ROWS, HostPart
from perfscope.analyzers.whatif.schedules.ops import Collective, RankOp, ScheduleOp, behind
from perfscope.analyzers.whatif.stage_schedules import (
    Layout,
    Piece,
    StageSchedule,
    StageStep,
    layout_of,
    taken_apart,
)
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import NEVER, NONE, Float64, Int64

_LEFT_OUT: Final[WeakKeyDictionary[RecordedSchedules, dict[tuple[bool, float], float]]] = WeakKeyDictionary()
"""(with hosts, step before micro-batches change) -> what schedules that are written anew leave out."""

_MOST: Final = 0.5
_MANY: Final = 0.25
"""A stage computes during most of a send, in many of them, where it does not wait for them."""

_UNSURE: Final = 0.5
"""Share of ``_LEAST_NS`` that kernels may take longer to start."""

_TOO_LONG: Final = 1.1
"""Nothing is predicted where what was recorded, written anew, takes so many times as long."""

_LEAST_NS: Final = 2_000.0
"""What a kernel, or on CPUs an operator, takes that does next to nothing."""


def _microbatches(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    count = whole_number(name, value, "a number of micro-batches")
    layout = layout_of(context, schedules, name)
    if count == layout.microbatches:
        return Uncertainty(0.0, 0.0)
    ends = {one: {rank_op.rank for rank_op in rank_ops} for one, rank_ops in schedules.collectives().items()}
    stages = {rank: taken_apart(schedules, layout, rank, name, ends) for rank in schedules.ops}
    schedules.longer = _left_out(schedules, context, layout, stages)
    schedules.ops = _written(context, layout, stages, count)
    schedules.settling = 1
    for rank in () if schedules.hosts else schedules.ops:
        # Where launches are not known, all that a host does may be for passes and messages.
        schedules.at_least(rank, context.host_busy_ns(rank) * count / layout.microbatches)
    starting_ns = max(_starting_ns(context, stage, count / layout.microbatches) for stage in stages.values())
    starting_ns *= 1 + (layout.stages - 1) / count  # the first and last stage wait for the passes of the others
    if count < layout.microbatches:
        return Uncertainty(less=0.10, more=0.10, slower_ns=starting_ns, faster_ns=_UNSURE * starting_ns)
    # Smaller products fill a device less well; on CPUs stages that no longer wait may compete for the same cores.
    return Uncertainty(
        less=0.30 if context.on_devices else 1.0, more=0.10, faster_ns=starting_ns, slower_ns=_UNSURE * starting_ns
    )


def _starting_ns(context: Context, stage: StageSchedule, times: float) -> float:
    """What ``times`` as many kernels per step take a stage more to start, or less: it is taken to be as long for each,
    and may be nothing, or more by ``_UNSURE``.
    """
    passes = sum(piece.work_ns for step in stage.steps for pieces in step.pieces.values() for piece in pieces)
    share = _of_starting(context.result.partials[stage.rank], context.result.steps)
    return share * abs(times - 1) * passes / max(len(stage.steps), 1)


def _written(
    context: Context, layout: Layout, stages: Mapping[int, StageSchedule], count: int
) -> dict[int, list[ScheduleOp]]:
    """All ranks' ops with so many micro-batches."""
    collectives: dict[tuple[object, ...], Collective] = {}
    return {rank: _MicrobatchWriter(context, layout, stage, count, collectives).ops() for rank, stage in stages.items()}


def _left_out(
    schedules: EditableSchedules, context: Context, layout: Layout, stages: Mapping[int, StageSchedule]
) -> float:
    """``_as_long`` of these schedules: found once for all numbers of micro-batches that are asked for."""
    known, recorded_ns = _LEFT_OUT.setdefault(context.recorded, {}), _step_ns(schedules, context)
    key = bool(schedules.hosts), recorded_ns  # what other settings have changed shows in the step
    if key not in known:
        written = replace(schedules, ops=_written(context, layout, stages, layout.microbatches), settling=1)
        written_ns = _step_ns(written, context)
        if written_ns > _TOO_LONG * recorded_ns > 0:
            raise CannotReplay(
                f"pipeline.microbatches: the {layout.microbatches} recorded micro-batches, put in an even order, would "
                f"take {written_ns / recorded_ns:.2f} times as long as they did: what the stages wait for is not known"
            )
        known[key] = _as_long(recorded_ns, written_ns)
    return known[key]


def _step_ns(schedules: EditableSchedules, context: Context) -> float:
    """Replayed; 0 where ranks would wait for each other forever."""
    replayed = replay(schedules.compiled())
    return schedules.step_ns(replayed, context.replayed_unchanged) if replayed.complete else 0.0


def _as_long(recorded_ns: float, written_ns: float) -> float:
    """The recorded step over the one written anew with as many micro-batches: its passes and messages are the recorded
    ones, but in an even order, which leaves out how unlike those of a busy machine are.
    """
    return recorded_ns / written_ns if recorded_ns and written_ns and recorded_ns > written_ns else 1.0


def _of_starting(partial: RankPartial, steps: Int64) -> float:
    """Share of the computation that kernels take however little they do; operators, on CPUs."""
    kernels = partial.tables.kernels
    if not partial.has_device_work:
        used, operators = partial.steps.indices_of(steps), partial.tables.operators
        took = float(
            partial.progress.own.totals(partial.steps.start_ns[used], partial.steps.end_ns[used])[
                :, TimeCategory.COMPUTE
            ].sum()
        )
        return min(float(operators.count[:, used].sum()) * _LEAST_NS / took, 1.0) if took else 0.0
    lines = [line for line, category in enumerate(kernels.category) if category == "compute"]
    used = partial.steps.indices_of(steps)
    count, total = (int(column[lines][:, used].sum()) for column in (kernels.count, kernels.total_ns))
    return min(count * _LEAST_NS / total, 1.0) if total else 0.0


def _waits_for_sends(partial: RankPartial) -> bool:
    """Does a stage compute only when what it sent has arrived? Not where it has computed during many of its sends."""
    own = partial.collectives
    sends = np.flatnonzero(np.array([kind == "send" for kind in own.kinds or ("",)])[own.kind])
    start, end = own.start_ns[sends], own.end_ns[sends]
    computed = partial.progress.own.where(TimeCategory.COMPUTE).within(start, end)
    return not len(sends) or float((computed > _MOST * (end - start)).mean()) < _MANY


def _synchronizes(piece: Piece) -> bool:
    """Does the host wait for its device in this pass? Where it does in few of a step, it does so once per step."""
    return any(op.kind is OpKind.SYNC for op in piece.ops) or piece.rows_ns[TimeCategory.SYNC] > 0


def _turns(layout: Layout, rank: int, count: int) -> list[Turn]:
    return turns(layout.schedule, layout.stages, layout.stage_of[rank], count)


@dataclass(frozen=True)
class _Model:
    """The recorded piece that a new one copies. ``copy`` numbers the copies of one piece; the ``last`` of them also
    gets what happens once per step. Does its host wait for the device (``waits``), as in the recorded one?
    """

    piece: Piece
    copy: int
    last: bool
    waits: bool


class _MicrobatchWriter:
    """Writes one rank's schedule for another number of micro-batches."""

    def __init__(
        self, context: Context, layout: Layout, stage: StageSchedule, count: int,
        collectives: dict[tuple[object, ...], Collective],
    ) -> None:  # fmt: skip
        self._context, self._layout, self._stage = context, layout, stage
        self._collectives = collectives
        self._scale = layout.microbatches / count
        self._turns = _turns(layout, stage.rank, count)
        self._waits_for_sends = _waits_for_sends(context.result.partials[stage.rank])
        self._starting = _of_starting(context.result.partials[stage.rank], context.result.steps)
        self._ops: list[ScheduleOp] = []
        self._carried: ScheduleOp | None = None
        self._now: dict[RankOp, RankOp] = {}
        self._unseen: dict[RankOp, None] = {}
        self._recorded: set[RankOp] = set()
        self._noted: set[int] = {NONE}
        self._once: ScheduleOp | None = None
        self._factors_of: dict[Piece, Float64] = {}
        self._sent: dict[tuple[int, bool], tuple[int, float]] = {}
        """Neighbouring stage and way -> bytes of a message with it, and its transfer (ns)."""

    def ops(self) -> list[ScheduleOp]:
        """All steps, with what is between them."""
        for number, between in enumerate(self._stage.between):
            for op in between.ops:
                self._copy(op)
            self._carry(between.tail)
            if number < len(self._stage.steps):
                self._step(number)
        return self._ops

    def _step(self, number: int) -> None:
        step = self._stage.steps[number]
        models = self._models(step.pieces)
        sent: dict[Hop, int] = {}
        self._once = step.exchanges.once
        for place, turn in enumerate(self._turns):
            if isinstance(turn, Work):
                for model in models[place]:
                    self._piece(model, step.number)
            else:
                self._exchange(turn, step, sent)
        self._wait([], step.number)

    def _models(self, pieces: dict[str, list[Piece]]) -> dict[int, list[_Model]]:
        """Place of each of the turns that are work -> what it copies, one after the other: recorded passes of its kind,
        or, where those are never next to each other in the recording, a recorded pass for each of them.
        """
        works = [(place, turn.passes) for place, turn in enumerate(self._turns) if isinstance(turn, Work)]
        parts = ((place, [passes] if passes in pieces else passes) for place, passes in works)
        used = grouped((passes, (place, number)) for place, each in parts for number, passes in enumerate(each))
        models: dict[tuple[int, int], _Model] = {}
        for passes, uses in used.items():
            known = pieces.get(passes)
            if not known:
                raise CannotReplay(
                    f"pipeline.microbatches: the recorded {self._layout.microbatches} micro-batches have no pass as "
                    "that many would need; record more of them"
                )
            after = [min(int((at + 0.5) * len(known) / len(uses)), len(known) - 1) for at in range(len(uses))]
            often = 2 * sum(map(_synchronizes, known)) > len(known)
            for at, use in enumerate(uses):
                last = at + 1 == len(uses) or after[at + 1] != after[at]
                models[use] = _Model(known[after[at]], at - after.index(after[at]), last, last or often)
        return grouped((place, model) for (place, _), model in sorted(models.items(), key=itemgetter(0)))

    def _piece(self, model: _Model, step: int) -> None:
        factors = self._factors_of.get(model.piece)
        if factors is None:
            factors = self._factors_of[model.piece] = self._factors(model.piece)
        if not model.waits:
            factors = factors.copy()
            factors[TimeCategory.SYNC] = 0.0
        for op in model.piece.ops:
            scaled = self._scaled(op, factors)
            rank_op = self._rank_op_of(op, model)
            if rank_op is not None:
                scaled.rank_op, scaled.step = rank_op, step
                self._emit(scaled)
            elif op.kind in (OpKind.NOTE, OpKind.LIMIT) or (op.kind is OpKind.SYNC and model.waits):
                self._of_host(scaled)
            else:
                self._carry(scaled)
        self._carry(self._scaled(model.piece.tail, factors))

    def _rank_op_of(self, op: ScheduleOp, model: _Model) -> RankOp | None:
        """What a copy of an op in a pass issues or waits for; None: nothing."""
        rank_op = op.rank_op
        if rank_op is None:
            return None
        if op.kind is not OpKind.ISSUE:
            if (now := self._now.get(rank_op)) is not None:
                self._unseen.pop(now, None)
            return now
        if rank_op.collective.group in self._stage.groups:
            self._now[rank_op] = self._like(rank_op, model.copy)
            self._unseen[self._now[rank_op]] = None
        elif model.last:
            self._now[rank_op] = rank_op
            self._recorded.add(rank_op)
        else:
            return None
        return self._now[rank_op]

    def _scaled(self, op: ScheduleOp, factors: Float64) -> ScheduleOp:
        """An op of a pass with its time ``factors`` times as long; its host launches as before."""
        host = op.host
        if host is None:
            scaled = op.with_time(op.own_ns * factors, None)
            scaled.lag_ns *= self._scale if op.issued else 1.0
            return scaled
        launches = host.launches.copy()
        launches[:, OF_DEVICE_ROWS:] *= factors
        return op.with_time(op.own_ns * factors, HostPart(host.own_ns.copy(), launches, host.lag_ns, host.waited_ns))

    def _factors(self, piece: Piece) -> Float64:
        """How many times as long each category of a piece takes. A host launches each pass as before, so where the
        device waits for it longer work takes the place of idle time.
        """
        factors = np.full(len(TimeCategory), self._scale)
        if not self._context.on_devices:
            # Between operators Python does as much for each pass, and so does each operator before it computes.
            factors[list(OF_HOST)] = 1.0
            factors[TimeCategory.COMPUTE] += self._starting * (1 - self._scale)
        else:
            idle = float(piece.rows_ns[list(OF_HOST)].sum())
            longer = max(self._scale - 1, 0.0) * (float(piece.rows_ns.sum()) - idle)
            factors[list(OF_HOST)] = max(1 - longer / idle, 0.0) if idle else 1.0
            factors[TimeCategory.DEPENDENCY] = 1.0  # between as many kernels
            factors[TimeCategory.COMPUTE] += self._starting * (1 - self._scale)
        return factors

    def _like(self, rank_op: RankOp, copy: int) -> RankOp:
        collective = rank_op.collective
        size = round(rank_op.bytes * self._scale)
        made = self._collectives.setdefault(
            (id(collective), copy),
            Collective(collective.kind, collective.group, size, collective.size, collective.step, collective.dtype),
        )
        return replace(rank_op, collective=made, transfer_ns=self._context.transfer_ns(rank_op, size))

    def _exchange(self, hops: Turn, step: StageStep, sent: dict[Hop, int]) -> None:
        assert isinstance(hops, tuple)
        rank_ops: list[RankOp] = []
        for hop in hops:
            number = sent[hop] = sent.get(hop, -1) + 1
            message = self._message(hop, step.number, number)
            if self._waits_for_sends or not hop.sends:
                rank_ops.append(message)
        if self._once is not None:
            self._carry(self._once)
            self._once = None
        self._carry(step.exchanges.each)
        self._wait(rank_ops, step.number)
        for kind, lag_ns in step.exchanges.host_waits.items():
            for rank_op in [*rank_ops] if kind is OpKind.JOIN else [None]:
                host = HostPart.only_lag(lag_ns)
                self._emit(ScheduleOp(kind, np.zeros(len(TimeCategory)), NEVER, rank_op, step=step.number, host=host))

    def _wait(self, rank_ops: list[RankOp], step: int) -> None:
        """Go on when these have ended. A collective of a pass for which no wait is recorded ended before the messages
        did: what follows needs both.
        """
        for rank_op in (*self._unseen, *rank_ops):
            self._emit(ScheduleOp.of(OpKind.WAIT, rank_op, step))
        self._unseen.clear()

    def _message(self, hop: Hop, step: int, number: int) -> RankOp:
        """Issue it."""
        rank, issue = self._stage.rank, self._stage.messages[hop.stage, hop.sends]
        model, peer = issue.rank_op, self._layout.peers[rank][hop.stage]
        assert model is not None
        ends = (rank, peer) if hop.sends else (peer, rank)
        way = hop.stage, hop.sends
        if way not in self._sent:
            size = round(model.bytes * self._scale)
            self._sent[way] = size, self._context.transfer_ns(model, size)
        size, transfer_ns = self._sent[way]
        collective = self._collectives.setdefault(
            (step, ends, hop.forward, number), Collective("send_recv", model.collective.group, size, 2, step)
        )
        lane = self._stage.lanes[way]
        rank_op = RankOp(rank, collective, lane, model.gap_ns, transfer_ns)
        written = issue.with_time(np.zeros(len(TimeCategory)), issue.host and HostPart.only_lag(issue.host.lag_ns))
        written.rank_op, written.step = rank_op, step
        self._emit(written)
        return rank_op

    def _copy(self, op: ScheduleOp) -> None:
        """As recorded; a wait for a message or a collective of a pass is over once that was."""
        rank_op = op.rank_op
        if op.kind is OpKind.ISSUE and rank_op is not None:
            self._recorded.add(rank_op)
        if rank_op is not None and rank_op not in self._recorded:
            self._carry(op)
        elif rank_op is None and op.kind not in (OpKind.MARK, OpKind.HOLD):
            self._of_host(op)
        else:
            self._emit(op.with_time(op.own_ns, op.host))

    def _of_host(self, op: ScheduleOp) -> None:
        """A wait of the host for its device, or what it refers to; none for what is not there any more."""
        if op.kind is OpKind.NOTE:
            self._noted.add(op.mark)
        if op.mark in self._noted:
            self._emit(op)
        else:
            self._carry(op)

    def _carry(self, time: ScheduleOp) -> None:
        """The time before an op that is not written comes before the next one."""
        self._carried = time if self._carried is None else behind(self._carried, time)

    def _emit(self, op: ScheduleOp) -> None:
        self._ops.append(op if self._carried is None else behind(self._carried, op))
        self._carried = None


SETTINGS = (
    Setting("pipeline.microbatches", "N", "the same batch in N micro-batches", _microbatches, 0, with_hosts=True),
)
