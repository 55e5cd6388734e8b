"""A replicated model sharded, or sharded further: what is then gathered and reduced, and when.

Only each rank's own time of the recorded step stays. Its collectives are written anew, as the framework in use would
issue them:

- torch, stage 3 (``fully_shard``, ``FULL_SHARD``): each unit is gathered before its forward and again before its
  backward, while the one before it computes (``BACKWARD_PRE``; for the forward by a host that runs ahead), and its
  gradients are reduce-scattered after it. Stage 2 (``SHARD_GRAD_OP``) omits the second gather. Stage 1
  (``ZeroRedundancyOptimizer``) reduces as before; each rank then broadcasts the parameters that it updated.
- DeepSpeed and Megatron-LM, stages 1 and 2: everything is gathered once, after the optimizer. DeepSpeed reduces in
  buckets of ``reduce_bucket_size``: after the backward at stage 1, during it at stage 2 and 3. The backward waits for
  each bucket unless ``overlap_comm`` is set.

Each rank updates 1/n of the parameters. On CPUs nothing overlaps: there torch waits for every gather and reduction.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import field
from statistics import NormalDist
from typing import Final

from perfscope.analyzers.replay.engine import OpKind, replay
from perfscope.analyzers.whatif.change import CannotReplay, Context, Uncertainty
from perfscope.analyzers.whatif.ddp import alone_share
from perfscope.analyzers.whatif.gathers import Gathers
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules, StepCollectives
from perfscope.analyzers.whatif.schedules.ops import Collective, RankOp, ScheduleOp
from perfscope.analyzers.whatif.schedules.steps import StepOps
from perfscope.analyzers.whatif.sharding_plan import Costs, ShardingPlan, plan_of
from perfscope.analyzers.whatif.sharding_recorded import (
    TrainingPhases,
    Units,
    compute_more,
    fluctuation_ns,
    optimizer_ns,
    phases,
    units,
)
from perfscope.frozen import dataclass
from perfscope.trace.trace import Float64

_MISSED: Final = 0.20
"""Share of what is saved or lost that the model may miss: overheads of wrappers, how far gathers are overlapped."""


def shard(
    schedules: EditableSchedules, context: Context, name: str, stages: tuple[int, int],
    gathers: Gathers, reductions: StepCollectives,
) -> Uncertainty:  # fmt: skip
    """Edit the schedules for ``stages`` (from, to; the second is higher). Raises CannotReplay with the reason."""
    _refuse(context, name, reductions)
    current, stage = stages
    rank_ops = [rank_op for steps in (reductions, gathers.by_step) for each in steps.values() for rank_op in each]
    first = rank_ops[0].collective
    alone = alone_share(context, first.group) if first.kind == "all_reduce" else 1.0
    plan = plan_of(context, stage, rank_ops[0])
    writer = _ShardingWriter(schedules, context, plan, Costs(context, rank_ops, alone))
    own: dict[int, list[float]] = {}
    for (rank, step), mine in sorted(reductions.items()):
        step_ops = StepOps(schedules, rank, step, whole=True)
        when = phases(context, step_ops, mine)
        gathered = gathers.by_step.get((rank, step), [])
        round_ = mine[: len(mine) // when.rounds]
        parted = units(context, gathers.once(rank, step) if plan.framework == "torch" else (), round_)
        saved = optimizer_ns(context, rank, step) * (1 - 1 / plan.ranks) if current == 0 else 0.0
        own.setdefault(rank, []).append(when.end - when.begin)
        writer.write(step_ops, when, parted, mine, frozenset(gathered), saved)
    # A wait may have ended in the next step only.
    schedules.without(writer.dropped)
    schedules.lanes += 1
    schedules.settling = 1
    writer.add_waits(fluctuation_ns(own))
    return writer.uncertainty(len(reductions)) if context.leaning == 0 else Uncertainty(0.0, 0.0)


def _refuse(context: Context, name: str, reductions: StepCollectives) -> None:
    if not reductions:
        raise CannotReplay(f"{name}: no reduction of gradients is recorded with its size; record with shapes")
    if any(not rank_op.collective.whole for rank_ops in reductions.values() for rank_op in rank_ops):
        raise CannotReplay(
            f"{name}: some ranks are not recorded, so their arrival at the new gathers is not known; record all ranks"
        )
    strategies = {name for run in context.runs.values() for name in run.strategies}
    if {"pipeline", "tensor"} & strategies or any(len(own.passes) for own in context.result.partials.values()):
        raise CannotReplay(f"{name}: how a pipeline or tensor parallel job would gather its parts is not known")
    if len({sum(rank_op.bytes for rank_op in rank_ops) for rank_ops in reductions.values()}) > 1:
        raise CannotReplay(f"{name}: the recorded steps reduce gradients unequally often; try ddp.no_sync first")


@dataclass(eq=False)
class _ShardingWriter:
    """Writes the steps of all ranks; the rank ops of one collective have the same number in the step."""

    schedules: EditableSchedules
    context: Context
    plan: ShardingPlan
    costs: Costs
    dropped: set[RankOp] = field(default_factory=set)
    _collectives: dict[tuple[int, int, int], Collective] = field(default_factory=dict)
    _added: list[tuple[float, ScheduleOp]] = field(default_factory=list)
    _open: list[RankOp] = field(default_factory=list)
    _rank_ops: list[RankOp] = field(default_factory=list)
    _number: int = 0
    _moments: int = 0
    _missed_ns: float = 0.0
    _waited_ns: float = 0.0

    def write(
        self, step_ops: StepOps, when: TrainingPhases, parted: Units, reductions: list[RankOp],
        gathers: frozenset[RankOp], saved_ns: float,
    ) -> None:  # fmt: skip
        """One step of one rank; its optimizer computes ``saved_ns`` less."""
        rank, step = step_ops.rank, step_ops.step
        self._added = []
        self._at, self._number = (rank, step, reductions[0].collective), 0
        as_recorded = self.plan.stage == 1 and self.plan.framework == "torch" and not gathers
        if not as_recorded:
            for microbatch in range(when.microbatches):
                last = microbatch == when.microbatches - 1
                reduces = when.rounds > 1 or last or self.plan.reduces_always
                self._passes(*when.of(microbatch), parted, reduces=reduces)
                # A backward ends when its reductions have.
                for rank_op in self._open:
                    self._wait(when.optimizer if last else when.of(microbatch)[2], rank_op)
                self._open = []
        if not self.plan.gathers_units:
            self._publish(min(when.optimizer + optimizer_ns(self.context, rank, step), when.last - 1), parted)
        out = frozenset() if as_recorded else frozenset(reductions) | gathers
        self.dropped |= out
        self._moments = len({at for at, op in self._added if op.kind is OpKind.WAIT})
        step_ops.replace(out, self._added)
        self._missed_ns += saved_ns / 2
        if not parted.known:
            self._missed_ns += self._unit_ns(parted)
        compute_more(self.schedules.ops[rank], step, when, -saved_ns)

    def add_waits(self, fluctuation_ns: float) -> None:
        """Lengthen transfers by the waits of ranks whose own time in a step fluctuates, for they meet more often now.

        The replay spreads each step's fluctuation evenly over the step, and ranks wait for it once. Of k pieces that
        fluctuate independently each has a k-th root of it, the last of n ranks is later than their mean by n's normal
        score, and that is waited for k times. What slows a rank for longer than a piece does less: half of that is
        replayed, give or take half.
        """
        ranks, moments = self.plan.ranks, max(self._moments, 1)
        score = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))  # Blom 1958
        self._waited_ns = score * fluctuation_ns * (math.sqrt(moments) - 1) / 2
        for rank_op in self._rank_ops:
            rank_op.transfer_ns += self._waited_ns / max(self._number, 1)

    def uncertainty(self, steps: int) -> Uncertainty:
        """Of all ``steps`` written (of all ranks): the model may miss a share, and the steps are replayed with quicker
        and slower transfers to see how far those are overlapped.
        """
        slower, as_is, quicker = (self._replayed_ns(sign) for sign in (1, 0, -1))
        transfers = max(slower - as_is, as_is - quicker, 0.0)
        return Uncertainty(less=_MISSED, more=_MISSED, either_ns=transfers + self._waited_ns + self._missed_ns / steps)

    def _replayed_ns(self, sign: int) -> float:
        """The step, ns, with all new transfers as much longer (or shorter) as they may be."""
        before = [rank_op.transfer_ns for rank_op in self._rank_ops]
        for rank_op in self._rank_ops:
            rank_op.transfer_ns *= 1 + sign * self.costs.error(rank_op.collective.kind)
        replayed = replay(self.schedules.compiled())
        for rank_op, transfer in zip(self._rank_ops, before, strict=True):
            rank_op.transfer_ns = transfer
        return self.schedules.step_ns(replayed, self.context.replayed_unchanged)

    def _passes(self, begin: float, turn: float, end: float, parted: Units, *, reduces: bool) -> None:
        """Forward and backward of one micro-batch."""
        bounds = parted.bounds
        forward = begin + (turn - begin) * bounds
        # Backwards: the last unit first.
        backward = turn + (end - turn) * (1 - bounds[::-1])
        if self.plan.gathers_units:
            if parted.root:
                self._wait(begin, self._issue(begin, "all_gather", parted.root * self.plan.whole))
            deque(self._gathers(parted.blocks, forward), maxlen=0)
        again = self._gathers(parted.blocks[::-1], backward) if self.plan.stage == 3 else iter(())
        held = parted.root if self.plan.bucket is not None else 0.0
        for number, size in enumerate(parted.blocks[::-1]):
            next(again, None)
            held += size
            if reduces and self.plan.reduces_early and held >= (self.plan.bucket or 0.0):
                self._reduce(float(backward[number + 1]), held)
                held = 0.0
        left = held + (parted.root if self.plan.bucket is None else 0.0)
        if reduces and left:
            for size in self._buckets(left):
                self._reduce(end, size)

    def _gathers(self, sizes: tuple[float, ...], at: Float64) -> Iterator[None]:
        """Before each unit's turn, issue the next one's gather and wait for its own."""
        ahead = None
        sizes = tuple(size * self.plan.whole for size in sizes)
        for number, size in enumerate(sizes):
            now = float(at[number])
            mine = ahead if ahead is not None else self._issue(now, "all_gather", size)
            if self.plan.on_cpus:
                self._wait(now, mine)
                ahead = None
            else:
                ahead = self._issue(now, "all_gather", sizes[number + 1]) if number + 1 < len(sizes) else None
                self._wait(now, mine)
            yield

    def _buckets(self, size: float) -> list[float]:
        """What is left at the end of a backward, in pieces as large as a bucket."""
        pieces = max(1, round(size / self.plan.bucket)) if self.plan.bucket else 1
        return [size / pieces] * pieces

    def _reduce(self, at: float, size: float) -> None:
        rank_op = self._issue(at, self.plan.reduction, size)
        if self.plan.blocking:
            self._wait(at, rank_op)
        else:
            self._open.append(rank_op)

    def _publish(self, at: float, parted: Units) -> None:
        """All parameters, to all ranks, once they are updated."""
        total = sum(parted.blocks) + parted.root
        if self.plan.framework != "torch":
            self._wait(at, self._issue(at, "all_gather", total))
            return
        models = [run.model for run in self.context.runs.values() if run.model is not None]
        # ``ZeroRedundancyOptimizer`` broadcasts parameter by parameter.
        parameters = max((len(model.trainable_sizes) for model in models), default=0)
        pieces = max(len(parted.blocks) + bool(parted.root), parameters)
        for rank_op in [self._issue(at, "broadcast", total / pieces) for _ in range(pieces)]:
            self._wait(at, rank_op)

    def _unit_ns(self, parted: Units) -> float:
        """By how much a step may differ with units twice as large, or half: as many more transfers start; the first
        gathers and the last reduction are not overlapped where others are.
        """
        if not self.plan.gathers_units:
            return 0.0
        kinds = ("all_gather", "all_gather", "reduce_scatter")
        starting = len(parted.blocks) * sum(self.costs.ns(kind, 0) for kind in kinds)
        size = sum(parted.blocks) / len(parted.blocks)
        return starting if self.plan.on_cpus else max(starting, sum(self.costs.ns(kind, size) for kind in kinds))

    def _issue(self, at: float, kind: str, size: float) -> RankOp:
        rank, step, like = self._at
        new = Collective(kind, like.group, round(size), like.size, step, like.dtype)
        collective = self._collectives.setdefault((step, new.group, self._number), new)
        self._number += 1
        # A stream of their own: recorded collectives stay in their order on all ranks.
        rank_op = RankOp(rank, collective, self.schedules.lanes, self.costs.gap_ns, self.costs.ns(kind, size))
        self._rank_ops.append(rank_op)
        self._added.append((at, ScheduleOp.of(OpKind.ISSUE, rank_op, step)))
        return rank_op

    def _wait(self, at: float, rank_op: RankOp) -> None:
        self._added.append((at, ScheduleOp.of(OpKind.WAIT, rank_op, rank_op.collective.step)))
