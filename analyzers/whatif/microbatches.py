"""More or fewer micro-batches in a pipeline, for the same batch.

The recorded program of each stage is taken apart at its messages: what lies between two exchanges are passes, whose own
time and collectives (tensor parallelism) serve as models for the passes of the new schedule. With m' micro-batches
instead of m each pass takes m/m' of its time and each message has m/m' of its bytes; what the host spends on a message
stays. What comes before the first pass and after the last (loading, reductions, the optimizer) stays as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfscope.analyzers.replay.engine import Op
from perfscope.analyzers.timeline import Row
from perfscope.analyzers.whatif.change import BadSetting, CannotReplay, Context, Setting, Uncertainty
from perfscope.analyzers.whatif.host_pace import keep_host_pace
from perfscope.analyzers.whatif.network import transfer_of
from perfscope.analyzers.whatif.schedules import Hop, Turn, Work, turns
from perfscope.analyzers.whatif.script import Line, Meeting, Part, Script
from perfscope.analyzers.whatif.stage_programs import Layout, Piece, StageProgram, layout_of, taken_apart
from perfscope.trace import Float64


def _microbatches(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    if not value.isdecimal() or int(value) < 1:
        raise BadSetting(f"{name}={value}: write a number of micro-batches, 1 or more")
    layout = layout_of(context, script, name)
    count = int(value)
    if count == layout.microbatches:
        return Uncertainty(0.0, 0.0)
    ends = {meeting: {part.rank for part in parts} for meeting, parts in script.meetings().items()}
    programs = {rank: taken_apart(script, layout, rank, name, ends) for rank in script.lines}
    meetings: dict[tuple[object, ...], Meeting] = {}
    for rank, program in programs.items():
        script.lines[rank] = _Writer(context, layout, program, count, meetings).lines()
    script.settling = 1
    # As many passes, each launched as before.
    keep_host_pace(script, context, count / layout.microbatches)
    if count < layout.microbatches:
        return Uncertainty(less=0.10, more=0.10)
    # Smaller products fill a device less well; on CPUs stages that no longer wait may compete for the same cores.
    on_devices = any(partial.has_device_work for partial in context.result.partials.values())
    return Uncertainty(less=0.30 if on_devices else 1.0, more=0.10)


@dataclass(frozen=True)
class _Model:
    """The recorded piece that a new one is made after; ``copy`` numbers those made after the same, the ``last`` of
    which also takes over what happens once a step.
    """

    piece: Piece
    copy: int
    last: bool


class _Writer:
    """Writes one rank's program for another number of micro-batches."""

    def __init__(
        self, context: Context, layout: Layout, program: StageProgram, count: int,
        meetings: dict[tuple[object, ...], Meeting],
    ) -> None:  # fmt: skip
        self._context, self._layout, self._program = context, layout, program
        self._meetings = meetings
        self._scale = layout.microbatches / count
        self._turns = turns(layout.schedule, layout.stages, layout.stage_of[program.rank], count)
        self._lines: list[Line] = []
        self._carried: Float64 = np.zeros(len(Row))
        self._now: dict[Part, Part] = {}
        self._unseen: dict[Part, None] = {}
        self._kept: set[Part] = set()

    def lines(self) -> list[Line]:
        """All steps, with what lies between them."""
        program = self._program
        for number, between in enumerate(program.between):
            for line in between.lines:
                self._keep(line)
            self._carried = self._carried + between.tail_ns
            if number < len(program.steps):
                self._step(number)
        return self._lines

    def _step(self, number: int) -> None:
        step = self._program.steps[number]
        models = self._models(step.pieces)
        sent: dict[Hop, int] = {}
        overhead = step.overhead_ns + step.once_ns
        for place, turn in enumerate(self._turns):
            if isinstance(turn, Work):
                self._piece(models[place], step.number)
            else:
                self._exchange(turn, step.number, overhead, sent)
                overhead = step.overhead_ns
        self._wait([], step.number)

    def _models(self, pieces: dict[str, list[Piece]]) -> dict[int, _Model]:
        """Place of each of the turns that are work -> what it is made after."""
        found: dict[int, _Model] = {}
        for passes in dict.fromkeys(turn.passes for turn in self._turns if isinstance(turn, Work)):
            places = [place for place, turn in enumerate(self._turns) if turn == Work(passes)]
            known = pieces.get(passes)
            if not known:
                raise CannotReplay(
                    f"pipeline.microbatches: with {self._layout.microbatches} micro-batches no stage works as it would "
                    "with that many; record more of them"
                )
            after = [min(int((at + 0.5) * len(known) / len(places)), len(known) - 1) for at in range(len(places))]
            for at, place in enumerate(places):
                last = at + 1 == len(places) or after[at + 1] != after[at]
                found[place] = _Model(known[after[at]], at - after.index(after[at]), last)
        return found

    def _piece(self, model: _Model, step: int) -> None:
        for line in model.piece.lines:
            part = line.part
            self._carried = self._carried + line.own_ns * self._scale
            if part is None:
                continue
            repeated = part.meeting.group in self._program.groups
            if line.op is Op.ISSUE and repeated:
                self._now[part] = self._like(part, model.copy)
                self._unseen[self._now[part]] = None
                self._emit(Line(Op.ISSUE, np.zeros(len(Row)), line.lag_ns * self._scale, self._now[part], step=step))
            elif line.op is Op.ISSUE and model.last:
                self._emit(Line(Op.ISSUE, np.zeros(len(Row)), line.lag_ns, part, step=step))
                self._now[part] = part
                self._kept.add(part)
            elif line.op is Op.BLOCK and part in self._now:
                self._unseen.pop(self._now[part], None)
                self._emit(Line(Op.BLOCK, np.zeros(len(Row)), line.lag_ns, self._now[part], step=step))
        self._carried = self._carried + model.piece.tail_ns * self._scale

    def _like(self, part: Part, copy: int) -> Part:
        meeting = part.meeting
        size = round((meeting.bytes or 0) * self._scale)
        made = self._meetings.setdefault(
            (id(meeting), copy),
            Meeting(meeting.kind, meeting.group, size, meeting.size, meeting.step, meeting.dtype),
        )
        return Part(part.rank, made, part.lane, part.gap_ns, transfer_of(self._context, part, size))

    def _exchange(self, hops: Turn, step: int, overhead: Float64, sent: dict[Hop, int]) -> None:
        assert isinstance(hops, tuple)
        parts = []
        for hop in hops:
            number = sent[hop] = sent.get(hop, -1) + 1
            parts.append(self._message(hop, step, number))
            self._emit(Line(Op.ISSUE, np.zeros(len(Row)), part=parts[-1], step=step))
        self._carried = self._carried + overhead
        self._wait(parts, step)

    def _wait(self, parts: list[Part], step: int) -> None:
        """Go on when these have ended. A collective of a pass that nothing was seen to wait for had ended before the
        messages did: what follows needs both.
        """
        for part in (*self._unseen, *parts):
            self._emit(Line(Op.BLOCK, np.zeros(len(Row)), part=part, step=step))
        self._unseen.clear()

    def _message(self, hop: Hop, step: int, number: int) -> Part:
        rank = self._program.rank
        peer = self._layout.peers[rank][hop.stage]
        model = self._program.messages[hop.stage]
        ends = (rank, peer) if hop.sends else (peer, rank)
        size = round((model.meeting.bytes or 0) * self._scale)
        meeting = self._meetings.setdefault(
            (step, ends, hop.forward, number), Meeting("send_recv", model.meeting.group, size, 2, step)
        )
        return Part(
            rank,
            meeting,
            self._program.lanes[hop.stage, hop.sends],
            model.gap_ns,
            transfer_of(self._context, model, size),
        )

    def _keep(self, line: Line) -> None:
        """As recorded; a wait for a message or a collective of a pass is over once that was."""
        self._carried = self._carried + line.own_ns
        part = line.part
        if line.op is Op.BLOCK and part is not None and part not in self._kept:
            return
        if line.op is Op.ISSUE and part is not None:
            self._kept.add(part)
        self._emit(Line(line.op, np.zeros(len(Row)), line.lag_ns, line.part, line.mark, line.hold_ns, line.step))

    def _emit(self, line: Line) -> None:
        line.own_ns, self._carried = self._carried, np.zeros(len(Row))
        self._lines.append(line)


SETTINGS = (
    Setting(
        "pipeline.microbatches", "N", "the same batch passed through the pipeline in N pieces", _microbatches, 0
    ),
)  # fmt: skip
