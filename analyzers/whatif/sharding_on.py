"""A replicated model sharded, or sharded further: what is gathered and reduced then, where, and what that takes.

The recorded step is taken down to each rank's own time, and laid out anew as the framework in use would do it:

- torch, stage 3 (``fully_shard``, ``FULL_SHARD``): each unit is gathered before its forward and again before its
  backward, while the one before it computes (``BACKWARD_PRE``; for the forward by a host that runs ahead), and its
  gradients are reduce-scattered after it. Stage 2 (``SHARD_GRAD_OP``) leaves the second gather out. Stage 1
  (``ZeroRedundancyOptimizer``) reduces as before; each rank then broadcasts the parameters that it updated.
- DeepSpeed and Megatron-LM, stages 1 and 2: everything is gathered once, after the optimizer. DeepSpeed reduces in
  buckets of ``reduce_bucket_size``: after the backward at stage 1, during it at stage 2 and 3, in its way unless
  ``overlap_comm`` is set.

Each rank updates 1/n of the parameters. On CPUs nothing overlaps: there torch has every gather and reduction block.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Final

import numpy as np

from perfscope.analyzers.replay.engine import Op, play
from perfscope.analyzers.timeline import Row
from perfscope.analyzers.whatif.change import CannotReplay, Context, Uncertainty
from perfscope.analyzers.whatif.ddp import alone_share
from perfscope.analyzers.whatif.relay import Stretch
from perfscope.analyzers.whatif.script import NEVER, Line, Meeting, Part, Script
from perfscope.analyzers.whatif.sharding_costs import Costs
from perfscope.analyzers.whatif.sharding_plan import Plan, plan_of
from perfscope.analyzers.whatif.sharding_traffic import Steps
from perfscope.analyzers.whatif.sharding_units import (
    Phases,
    Units,
    compute_more,
    fluctuation_ns,
    optimizer_ns,
    phases,
    units,
)
from perfscope.trace import Float64

_MISSED: Final = 0.20
"""Share of what is saved or lost that the layout may miss: overheads of wrappers, how far gathers hide."""


def shard(
    script: Script, context: Context, name: str, stages: tuple[int, int], gathers: Steps, reductions: Steps
) -> Uncertainty:
    """Play ``stages`` (from, to; the second is higher). Raises CannotReplay with the reason."""
    _refuse_unplayable(context, name, reductions)
    current, stage = stages
    parts = [part for steps in (reductions, gathers) for each in steps.values() for part in each]
    first = parts[0]
    kind = first.meeting.kind
    alone = alone_share(context, first.meeting.group) if kind == "all_reduce" else 1.0
    plan = plan_of(context, stage, first)
    writer = _Writer(script, context, plan, Costs(context, parts, alone))
    own: dict[int, list[float]] = {}
    for (rank, step), mine in sorted(reductions.items()):
        stretch = Stretch(script, rank, step, whole=True)
        when = phases(context, stretch, rank, step, mine)
        gathered = gathers.get((rank, step), [])
        round_ = mine[: _rounds(mine, when.microbatches)[1]]
        parted = units(context, gathered if plan.framework == "torch" else [], round_)
        saved = optimizer_ns(context, rank, step) * (1 - 1 / plan.ranks) if current == 0 else 0.0
        own.setdefault(rank, []).append(when.end - when.begin)
        writer.write(stretch, rank, step, when, parted, mine, frozenset(gathered), saved)
    # A wait may have ended in the next step only.
    script.without(writer.dropped)
    script.lanes += 1
    script.settling = 1
    writer.meet(fluctuation_ns(own))
    return writer.uncertainty(len(reductions)) if context.leaning == 0 else Uncertainty(0.0, 0.0)


def _refuse_unplayable(context: Context, name: str, reductions: Steps) -> None:
    if not reductions:
        raise CannotReplay(f"{name}: no reduction of gradients is recorded with its size; record with shapes")
    if any(part.meeting.floor_ns != NEVER for parts in reductions.values() for part in parts):
        raise CannotReplay(f"{name}: when other ranks would come to gathers is not recorded; record all ranks")
    strategies = {name for run in context.runs.values() for name in run.strategies}
    if {"pipeline", "tensor"} & strategies or any(len(own.passes) for own in context.result.partials.values()):
        raise CannotReplay(f"{name}: how a pipeline or tensor parallel job would gather its parts is not known")
    if len({sum(part.meeting.bytes or 0 for part in parts) for parts in reductions.values()}) > 1:
        raise CannotReplay(f"{name}: gradients are reduced unevenly often in the recorded steps; try ddp.no_sync first")


def _rounds(reductions: list[Part], microbatches: int) -> tuple[int, int]:
    """(how often gradients are reduced in the step, collectives each time)."""
    sizes = [part.meeting.bytes for part in reductions]
    once = len(sizes) // microbatches
    each = microbatches > 1 and once > 0 and sizes == sizes[:once] * microbatches
    return (microbatches, once) if each else (1, len(sizes))


@dataclass(eq=False)
class _Writer:
    """Lays out the steps of all ranks; parts of one collective meet by their number in the step."""

    script: Script
    context: Context
    plan: Plan
    costs: Costs
    dropped: set[Part] = field(default_factory=set)
    _meetings: dict[tuple[int, int], Meeting] = field(default_factory=dict)
    _added: list[tuple[float, Line]] = field(default_factory=list)
    _open: list[Part] = field(default_factory=list)
    _parts: list[Part] = field(default_factory=list)
    _number: int = 0
    _moments: int = 0
    _missed_ns: float = 0.0
    _waited_ns: float = 0.0

    def write(
        self, stretch: Stretch, rank: int, step: int, when: Phases, parted: Units, reductions: list[Part],
        gathers: frozenset[Part], saved_ns: float,
    ) -> None:  # fmt: skip
        """One step of one rank; ``saved_ns`` is what its optimizer computes less."""
        self._added = []
        self._at, self._number = (rank, step, reductions[0].meeting), 0
        rounds = _rounds(reductions, when.microbatches)[0]
        kept = self.plan.stage == 1 and self.plan.framework == "torch" and not gathers
        if not kept:
            for microbatch in range(when.microbatches):
                last = microbatch == when.microbatches - 1
                reduces = rounds > 1 or last or self.plan.reduces_always
                self._passes(*when.of(microbatch), parted, reduces=reduces)
                # A backward ends when its reductions have.
                for part in self._open:
                    self._wait(when.optimizer if last else when.of(microbatch)[2], part)
                self._open = []
        if not self.plan.gathers_units:
            self._publish(min(when.optimizer + optimizer_ns(self.context, rank, step), when.last - 1), parted)
        out = frozenset() if kept else frozenset(reductions) | gathers
        self.dropped |= out
        self._moments = len({at for at, line in self._added if line.op is Op.BLOCK})
        stretch.replace(out, self._added)
        self._missed_ns += saved_ns / 2
        if not parted.known:
            self._missed_ns += self._unit_ns(parted)
        compute_more(self.script.lines[rank], step, when, -saved_ns)

    def meet(self, fluctuation_ns: float) -> None:
        """Have ranks wait for each other more often, whose own time in a step fluctuates by so much.

        Played, each step's fluctuation is spread evenly over it, and met once. Of k pieces that fluctuate independently
        each has a k-th root of it, the last of n ranks is later than their mean by n's normal score, and that is waited
        for k times. What slows a rank for longer than a piece does less: half of that is played, give or take half.
        """
        ranks, meetings = self.plan.ranks, max(self._moments, 1)
        score = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))  # Blom 1958
        self._waited_ns = score * fluctuation_ns * (math.sqrt(meetings) - 1) / 2
        for part in self._parts:
            part.transfer_ns += self._waited_ns / max(self._number, 1)

    def uncertainty(self, steps: int) -> Uncertainty:
        """Of all ``steps`` written (of all ranks): the layout may miss a share, and the steps are played with quicker
        and slower transfers to see how far those are hidden.
        """
        slower, as_is, quicker = (self._played_ns(sign) for sign in (1, 0, -1))
        transfers = max(slower - as_is, as_is - quicker, 0.0)
        return Uncertainty(less=_MISSED, more=_MISSED, either_ns=transfers + self._waited_ns + self._missed_ns / steps)

    def _played_ns(self, sign: int) -> float:
        """The step, ns, with all that was put in taking as much longer (or shorter) as it may."""
        before = [part.transfer_ns for part in self._parts]
        for part in self._parts:
            part.transfer_ns *= 1 + sign * self.costs.error(part.meeting.kind)
        played = play(self.script.programs())
        for part, transfer in zip(self._parts, before, strict=True):
            part.transfer_ns = transfer
        return self.script.step_ns(played, self.context.unchanged)

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
        """Before each unit's turn, hand over the next one's gather and wait for its own."""
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
        part = self._issue(at, self.plan.reduction, size)
        if self.plan.blocking:
            self._wait(at, part)
        else:
            self._open.append(part)

    def _publish(self, at: float, parted: Units) -> None:
        """All parameters, to all ranks, once they are updated."""
        total = sum(parted.blocks) + parted.root
        if self.plan.framework != "torch":
            self._wait(at, self._issue(at, "all_gather", total))
            return
        pieces = max(len(parted.blocks) + bool(parted.root), self._parameters())
        for part in [self._issue(at, "broadcast", total / pieces) for _ in range(pieces)]:
            self._wait(at, part)

    def _parameters(self) -> int:
        """``ZeroRedundancyOptimizer`` broadcasts parameter by parameter."""
        return max((len(run.model.trainable_sizes) for run in self.context.runs.values() if run.model), default=0)

    def _unit_ns(self, parted: Units) -> float:
        """What units twice as large, or half, may make of a step: as many more are started; where others are hidden
        the first gathers and the last reduction are not.
        """
        if not self.plan.gathers_units:
            return 0.0
        kinds = ("all_gather", "all_gather", "reduce_scatter")
        starting = len(parted.blocks) * sum(self.costs.ns(kind, 0) for kind in kinds)
        size = sum(parted.blocks) / len(parted.blocks)
        return starting if self.plan.on_cpus else max(starting, sum(self.costs.ns(kind, size) for kind in kinds))

    def _issue(self, at: float, kind: str, size: float) -> Part:
        rank, step, like = self._at
        new = Meeting(kind, like.group, round(size), like.size, step, like.dtype)
        meeting = self._meetings.setdefault((step, self._number), new)
        self._number += 1
        # A stream of their own: collectives that stay keep their order on all ranks.
        part = Part(rank, meeting, self.script.lanes, self.costs.gap_ns, self.costs.ns(kind, size))
        self._parts.append(part)
        self._added.append((at, Line(Op.ISSUE, np.zeros(len(Row)), part=part, step=step)))
        return part

    def _wait(self, at: float, part: Part) -> None:
        self._added.append((at, Line(Op.BLOCK, np.zeros(len(Row)), part=part, step=part.meeting.step)))
