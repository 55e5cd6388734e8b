"""More or fewer micro-batches in a pipeline, for the same batch.

The recorded schedule of each stage is divided at its messages (``stage_schedules``). Between two exchanges are passes;
their own time and collectives (tensor parallelism) serve as models for the passes of the new schedule. With m'
micro-batches instead of m each pass takes m/m' of its time and each message has m/m' of its bytes; what the host spends
on a pass or a message stays. What comes before the first pass and after the last (loading, reductions, the optimizer)
stays too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter
from statistics import median

import numpy as np

from perfscope.analyzers.rank.host_lane import OF_HOST
from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.whatif.change import CannotReplay, Context, Setting, Uncertainty, whole_number
from perfscope.analyzers.whatif.pipeline_turns import Hop, Turn, Work, turns
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.analyzers.whatif.schedules.ops import Collective, RankOp, ScheduleOp
from perfscope.analyzers.whatif.stage_schedules import Layout, Piece, StageSchedule, layout_of, taken_apart
from perfscope.grouping import grouped
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import NONE, Float64


def _microbatches(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    count = whole_number(name, value, "a number of micro-batches")
    layout = layout_of(context, schedules, name)
    if count == layout.microbatches:
        return Uncertainty(0.0, 0.0)
    ends = {one: {rank_op.rank for rank_op in rank_ops} for one, rank_ops in schedules.collectives().items()}
    stages = {rank: taken_apart(schedules, layout, rank, name, ends) for rank in schedules.ops}
    collectives: dict[tuple[object, ...], Collective] = {}
    for rank, stage in stages.items():
        schedules.ops[rank] = _MicrobatchWriter(context, layout, stage, count, collectives).ops()
    schedules.settling = 1
    for rank in schedules.ops:
        more = (count / layout.microbatches - 1) * _host_of_passes_ns(context, layout, rank)
        schedules.at_least(rank, context.host_busy_ns(rank) + more)
    if count < layout.microbatches:
        return Uncertainty(less=0.10, more=0.10)
    # Smaller products fill a device less well; on CPUs stages that no longer wait may compete for the same cores.
    return Uncertainty(less=0.30 if context.on_devices else 1.0, more=0.10)


def _turns(layout: Layout, rank: int, count: int) -> list[Turn]:
    return turns(layout.schedule, layout.stages, layout.stage_of[rank], count)


def _host_of_passes_ns(context: Context, layout: Layout, rank: int) -> float:
    """What a rank's host does for all passes and messages of a step, as long for each however small: what it does from
    the first message to the last, and as much for each pass before and after. All that it does where its launches are
    not known.
    """
    partial = context.result.partials[rank]
    lane, collectives, busy = partial.progress.host, partial.collectives, context.host_busy_ns(rank)
    sent = np.unique(collectives.messages.collective)
    if lane is None or not len(sent):
        return busy
    passes = [len(turn.passes) if isinstance(turn, Work) else 0 for turn in _turns(layout, rank, layout.microbatches)]
    inside = sum(passes[1:-1])
    steps = partial.steps.indices_of(context.result.steps)
    issued = [lane.issued_ns[sent[collectives.step[sent] == step]] for step in steps]
    ends = [np.array((at.min(), at.max())) for at in issued if len(at) and (at != NONE).all()]
    took = [float(np.diff(lane.rows_at(at).sum(axis=1))[0]) for at in ends]
    return min(busy, median(took) * sum(passes) / max(inside, 1)) if took else busy


@dataclass(frozen=True)
class _Model:
    """The recorded piece that a new one copies. ``copy`` numbers the copies of one piece; the ``last`` of them also
    gets what happens once per step.
    """

    piece: Piece
    copy: int
    last: bool


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
        self._ops: list[ScheduleOp] = []
        self._carried: Float64 = np.zeros(len(TimeCategory))
        self._now: dict[RankOp, RankOp] = {}
        self._unseen: dict[RankOp, None] = {}
        self._recorded: set[RankOp] = set()

    def ops(self) -> list[ScheduleOp]:
        """All steps, with what is between them."""
        for number, between in enumerate(self._stage.between):
            for op in between.ops:
                self._copy(op)
            self._carried = self._carried + between.tail_ns
            if number < len(self._stage.steps):
                self._step(number)
        return self._ops

    def _step(self, number: int) -> None:
        step = self._stage.steps[number]
        models = self._models(step.pieces)
        sent: dict[Hop, int] = {}
        overhead = step.overhead_ns + step.once_ns
        for place, turn in enumerate(self._turns):
            if isinstance(turn, Work):
                for model in models[place]:
                    self._piece(model, step.number)
            else:
                self._exchange(turn, step.number, overhead, sent)
                overhead = step.overhead_ns
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
            for at, use in enumerate(uses):
                last = at + 1 == len(uses) or after[at + 1] != after[at]
                models[use] = _Model(known[after[at]], at - after.index(after[at]), last)
        return grouped((place, model) for (place, _), model in sorted(models.items(), key=itemgetter(0)))

    def _piece(self, model: _Model, step: int) -> None:
        factors = self._factors(model.piece)
        for op in model.piece.ops:
            rank_op = op.rank_op
            self._carried = self._carried + op.own_ns * factors
            if rank_op is None:
                continue
            repeated = rank_op.collective.group in self._stage.groups
            if op.kind is OpKind.ISSUE and repeated:
                self._now[rank_op] = self._like(rank_op, model.copy)
                self._unseen[self._now[rank_op]] = None
                self._emit(ScheduleOp.of(OpKind.ISSUE, self._now[rank_op], step, op.lag_ns * self._scale))
            elif op.kind is OpKind.ISSUE and model.last:
                self._emit(ScheduleOp.of(OpKind.ISSUE, rank_op, step, op.lag_ns))
                self._now[rank_op] = rank_op
                self._recorded.add(rank_op)
            elif op.kind is OpKind.WAIT and rank_op in self._now:
                self._unseen.pop(self._now[rank_op], None)
                self._emit(ScheduleOp.of(OpKind.WAIT, self._now[rank_op], step, op.lag_ns))
        self._carried = self._carried + model.piece.tail_ns * factors

    def _factors(self, piece: Piece) -> Float64:
        """How many times as long each category of a piece takes. A host launches each pass as before, so where the
        device waits for it longer work takes the place of idle time.
        """
        factors = np.full(len(TimeCategory), self._scale)
        if self._context.on_devices:
            idle = float(piece.rows_ns[list(OF_HOST)].sum())
            longer = max(self._scale - 1, 0.0) * (float(piece.rows_ns.sum()) - idle)
            factors[list(OF_HOST)] = max(1 - longer / idle, 0.0) if idle else 1.0
        return factors

    def _like(self, rank_op: RankOp, copy: int) -> RankOp:
        collective = rank_op.collective
        size = round(rank_op.bytes * self._scale)
        made = self._collectives.setdefault(
            (id(collective), copy),
            Collective(collective.kind, collective.group, size, collective.size, collective.step, collective.dtype),
        )
        return replace(rank_op, collective=made, transfer_ns=self._context.transfer_ns(rank_op, size))

    def _exchange(self, hops: Turn, step: int, overhead: Float64, sent: dict[Hop, int]) -> None:
        assert isinstance(hops, tuple)
        rank_ops = []
        for hop in hops:
            number = sent[hop] = sent.get(hop, -1) + 1
            rank_ops.append(self._message(hop, step, number))
            self._emit(ScheduleOp.of(OpKind.ISSUE, rank_ops[-1], step))
        self._carried = self._carried + overhead
        self._wait(rank_ops, step)

    def _wait(self, rank_ops: list[RankOp], step: int) -> None:
        """Go on when these have ended. A collective of a pass for which no wait is recorded ended before the messages
        did: what follows needs both.
        """
        for rank_op in (*self._unseen, *rank_ops):
            self._emit(ScheduleOp.of(OpKind.WAIT, rank_op, step))
        self._unseen.clear()

    def _message(self, hop: Hop, step: int, number: int) -> RankOp:
        rank = self._stage.rank
        peer = self._layout.peers[rank][hop.stage]
        model = self._stage.messages[hop.stage]
        ends = (rank, peer) if hop.sends else (peer, rank)
        size = round(model.bytes * self._scale)
        collective = self._collectives.setdefault(
            (step, ends, hop.forward, number), Collective("send_recv", model.collective.group, size, 2, step)
        )
        lane = self._stage.lanes[hop.stage, hop.sends]
        return RankOp(rank, collective, lane, model.gap_ns, self._context.transfer_ns(model, size))

    def _copy(self, op: ScheduleOp) -> None:
        """As recorded; a wait for a message or a collective of a pass is over once that was."""
        self._carried = self._carried + op.own_ns
        rank_op = op.rank_op
        if op.kind is OpKind.WAIT and rank_op is not None and rank_op not in self._recorded:
            return
        if op.kind is OpKind.ISSUE and rank_op is not None:
            self._recorded.add(rank_op)
        self._emit(replace(op))

    def _emit(self, op: ScheduleOp) -> None:
        op.own_ns, self._carried = self._carried, np.zeros(len(TimeCategory))
        self._ops.append(op)


SETTINGS = (Setting("pipeline.microbatches", "N", "the same batch in N micro-batches", _microbatches, 0),)
