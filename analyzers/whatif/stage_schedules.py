"""A recorded pipeline divided into pieces: what each stage did between its messages, and what it sent to which rank."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import replace
from statistics import median
from typing import Final

import numpy as np

from perfscope.analyzers.job.pipelines.messages import PipelineMessages, pipeline_messages
from perfscope.analyzers.job.pipelines.schedule import find_schedule
from perfscope.analyzers.job.pipelines.stages import place
from perfscope.analyzers.rank.collectives.collectives import POINT_TO_POINT
from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.whatif.change import CannotReplay, Context
from perfscope.analyzers.whatif.pipeline_turns import CONSTRUCTED, Work, turns
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.analyzers.whatif.schedules.hosts import HOST_ROWS, OWN_ROWS, HostPart
from perfscope.analyzers.whatif.schedules.ops import Collective, RankOp, ScheduleOp, left_out, without
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.results.categories import TimeCategory
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NEVER, NONE, Float64

_APART: Final = 0.05
"""Computation between two messages is a pass from this share of the mean pass on."""

_LONGER: Final = 3.0
"""Passes that are told by their own time take so many times as long as what is between other messages."""


@dataclass(frozen=True)
class Layout:
    """Which rank does what in the recorded pipeline. ``peers``: rank -> neighbouring stage -> the rank there that it
    exchanges messages with; ``groups`` are the process groups of those messages.
    """

    schedule: str
    stages: int
    microbatches: int
    stage_of: Mapping[int, int]
    peers: Mapping[int, Mapping[int, int]]
    groups: frozenset[int]
    at_once: bool
    """Several messages travel in one kernel, both ways at once."""

    def is_message(self, op: ScheduleOp) -> bool:
        """Does the op issue a message, or wait for one?"""
        collective = op.rank_op.collective if op.rank_op is not None else None
        return collective is not None and collective.kind in POINT_TO_POINT and collective.group in self.groups


@dataclass(frozen=True, eq=False)
class Piece:
    """What a rank did between two exchanges: ops that are no messages, then the time of ``tail``."""

    ops: list[ScheduleOp]
    tail: ScheduleOp

    @functools.cached_property
    def rows_ns(self) -> Float64:
        """All of its own time by category, then its host's, where that is beside the device."""
        return np.asarray(np.add.reduce([_rows(op) for op in (*self.ops, self.tail)]))

    @property
    def own_ns(self) -> float:
        """All of its own time."""
        return float(self.rows_ns[:OWN_ROWS].sum())

    @property
    def work_ns(self) -> float:
        """What of it is computation: copies and loading are no part of a pass, and idle time for the host is in
        exchanges, too.
        """
        return float(self.rows_ns[TimeCategory.COMPUTE])


@dataclass(frozen=True)
class Exchanges:
    """The time of those of one step: of each of them, and what the first takes in addition (the copy of the batch).
    ``host_waits``: what its host waits for in each (SYNC, JOIN), and its lag.
    """

    each: ScheduleOp
    once: ScheduleOp
    host_waits: dict[OpKind, float]


@dataclass(frozen=True)
class StageStep:
    """One step of one rank: its pieces by passes (``F``, ``B``, ``FB``), in order, and its exchanges."""

    number: int
    pieces: dict[str, list[Piece]]
    exchanges: Exchanges


@dataclass(frozen=True)
class StageSchedule:
    """One rank's schedule in parts: ``between[0]``, ``steps[0]``, ``between[1]`` … ``messages`` are models of the ops
    that issue those for each neighbouring stage and way (does it send?), ``lanes`` the stream for each of these;
    ``groups`` are the process groups whose collectives belong to every pass.
    """

    rank: int
    steps: list[StageStep]
    between: list[Piece]
    messages: dict[tuple[int, bool], ScheduleOp]
    lanes: dict[tuple[int, bool], int]
    groups: frozenset[int]


def time_alone(rows_ns: Float64, host: HostPart | None) -> ScheduleOp:
    """Time that comes before the next op, ``rows_ns`` as in ``Piece``; without a ``host`` its own time alone."""
    alone = None if host is None else replace(HostPart.none(), own_ns=rows_ns[OWN_ROWS:].copy())
    return ScheduleOp(OpKind.MARK, rows_ns[:OWN_ROWS].copy(), host=alone)


def _rows(op: ScheduleOp) -> Float64:
    return np.concatenate((op.own_ns, np.zeros(HOST_ROWS) if op.host is None else op.host.own_ns))


def layout_of(context: Context, schedules: EditableSchedules, name: str) -> Layout:
    """The recorded pipeline. Raises CannotReplay where there is none, or its schedule cannot be constructed."""
    result = context.result
    messages = pipeline_messages(result)
    placement = place(result, messages)
    if not placement.stage_of or placement.degree is None:
        raise CannotReplay(f"{name}: the recording holds no pipeline whose stages are known")
    schedule = find_schedule(result, messages, placement, context.runs)
    if schedule.microbatches is None or schedule.chunks != 1 or schedule.name not in CONSTRUCTED:
        raise CannotReplay(
            f"{name}: the schedule of this pipeline ({schedule.name}, {schedule.chunks or 'unknown'} chunks per stage) "
            f"cannot be constructed for another number; {' and '.join(CONSTRUCTED)} with one chunk can"
        )
    missing = set(placement.stage_of) - set(schedules.ops)
    if missing or len(set(placement.stage_of.values())) != placement.degree:
        raise CannotReplay(f"{name}: ranks of the pipeline are missing from the recording; record all of them")
    return Layout(
        schedule=schedule.name,
        stages=placement.degree,
        microbatches=schedule.microbatches,
        stage_of=placement.stage_of,
        peers=_peers(messages, placement.stage_of, name),
        groups=frozenset(distinct(result.matched.instances.group[result.matched.instance[messages.line]]).tolist()),
        at_once=len(distinct(messages.line)) < len(messages),
    )


def _peers(messages: PipelineMessages, stage_of: Mapping[int, int], name: str) -> dict[int, dict[int, int]]:
    peers: dict[int, dict[int, int]] = {}
    for rank, peer in sorted(set(zip(messages.rank.tolist(), messages.peer.tolist(), strict=True))):
        if peer == NONE or peer not in stage_of:
            raise CannotReplay(f"{name}: it is not recorded which rank exchanges messages with rank {rank}")
        if peers.setdefault(rank, {}).setdefault(stage_of[peer], peer) != peer:
            raise CannotReplay(f"{name}: rank {rank} exchanges messages with several ranks of one stage")
    return peers


def taken_apart(
    schedules: EditableSchedules, layout: Layout, rank: int, name: str, ends: Mapping[Collective, set[int]]
) -> StageSchedule:
    """One rank's schedule in parts; ``ends`` are the ranks of each collective. Raises CannotReplay where its passes do
    not fit the pipeline's schedule.
    """
    listed = turns(layout.schedule, layout.stages, layout.stage_of[rank], layout.microbatches)
    opens, closes = isinstance(listed[0], Work), isinstance(listed[-1], Work)
    ops = schedules.ops[rank]
    if not schedules.hosts:  # else they are in the order of the program
        ops = _collectives_first(ops, layout)
        ops = ops if opens else _issued_when_waited_for(ops, layout, schedules.steps)
    sections: dict[int, tuple[int, int]] = {}
    for at, op in enumerate(ops):
        if (rank_op := op.issued) is not None and layout.is_message(op) and rank_op.collective.step in schedules.steps:
            step = rank_op.collective.step
            sections[step] = sections.get(step, (at, at))[0], at
    works = [turn.passes for turn in listed if isinstance(turn, Work)]
    inner = works[opens : len(works) - closes]
    insides: dict[int, list[ScheduleOp]] = {}
    between: list[Piece] = []
    begun: list[ScheduleOp] = []
    end = 0
    for step, (first, last) in sorted(sections.items()):
        before, insides[step], behind = _marks_outside(ops[first : last + 1])
        between.append(Piece([*begun, *ops[end:first], *before], insides[step][0]))
        begun, end = behind, last + 1
    steps = _steps(layout, insides, inner, f"{name}: rank {rank}")
    between.append(Piece([*begun, *ops[end:]], time_alone(np.zeros(OWN_ROWS + HOST_ROWS), ops[-1].host)))
    groups = _of_every_pass(steps)
    for number, step_ in enumerate(steps):
        if opens:
            wanted = _like(step_, works[0], name)
            between[number], found = _divided(between[number], wanted, at_end=True)
            step_.pieces[works[0]].insert(0, found)
        if closes:
            wanted = _like(step_, works[-1], name)
            found, between[number + 1] = _divided(between[number + 1], wanted, at_end=False)
            step_.pieces[works[-1]].append(found)
    messages = {
        (stage, sends): _typical_message(ops, layout, peer, ends, sends=sends)
        for stage, peer in layout.peers[rank].items()
        for sends in (True, False)
    }
    return StageSchedule(rank, steps, between, messages, _lanes(schedules, layout, messages), groups)


def _marks_outside(ops: list[ScheduleOp]) -> tuple[list[ScheduleOp], list[ScheduleOp], list[ScheduleOp]]:
    """(marks that come before the messages of a step, its other ops, marks that come after them). A host issues the
    first message before its device begins the step, and the last one after that has ended.
    """
    half = len(ops) // 2
    before, behind = (
        [replace(op, own_ns=np.zeros(OWN_ROWS), host=_only_lag(op.host))
         for op in some if op.kind is OpKind.MARK]
        for some in (ops[:half], ops[half:])
    )  # fmt: skip
    inside, _ = left_out(ops, lambda op: op.kind is OpKind.MARK) if before or behind else (ops, None)
    return before, inside, behind


def _collectives_first(ops: list[ScheduleOp], layout: Layout) -> list[ScheduleOp]:
    """The same ops; of those issued at one moment, a pass's last collective comes before the messages that follow it.

    Both could start once the last kernel of the pass had ended; which comes first in a recording is chance.
    """
    ordered: list[ScheduleOp] = []
    first: int | None = None
    for op in ops:
        rank_op = op.rank_op
        if layout.is_message(op):
            first = None if op.kind is not OpKind.ISSUE else len(ordered) if first is None or op.own_ns.any() else first
        elif op.kind is not OpKind.ISSUE or rank_op is None or op.own_ns.any():
            first = None
        elif first is not None and all(
            other.rank_op is None or other.rank_op.lane != rank_op.lane for other in ordered[first:]
        ):
            after = ordered[first]
            ordered[first] = replace(after, own_ns=op.own_ns)
            ordered.insert(first, replace(op, own_ns=after.own_ns))
            first += 1
            continue
        ordered.append(op)
    return ordered


def _issued_when_waited_for(ops: list[ScheduleOp], layout: Layout, steps: Set[int]) -> list[ScheduleOp]:
    """The same ops; the recv that opens a step is issued where the stage waits for it. A host that runs ahead issues
    it before its device begins the step: what the device does until the wait is no pass.
    """
    opening: dict[int | None, RankOp] = {}
    for op in ops:
        rank_op = op.issued
        if rank_op is not None and layout.is_message(op) and (step := rank_op.collective.step) in steps:
            opening.setdefault(step, rank_op)
    awaited = {op.rank_op for op in ops if op.kind is OpKind.WAIT}
    moved = {rank_op for rank_op in opening.values() if rank_op in awaited}
    left, _ = without(ops, moved, OpKind.ISSUE)
    ordered: list[ScheduleOp] = []
    for op in left:
        if op.kind is OpKind.WAIT and op.rank_op in moved:
            moved.remove(op.rank_op)
            ordered.append(replace(op, kind=OpKind.ISSUE, lag_ns=0.0))
            ordered.append(replace(op, own_ns=np.zeros(len(TimeCategory))))
        else:
            ordered.append(op)
    return ordered


def _pieces(layout: Layout, ops: list[ScheduleOp]) -> list[Piece]:
    """What is between the messages of one step. A host that waits for a message while its device computes does not
    divide what that does: the wait comes before it, as its message does.
    """
    pieces: list[Piece] = []
    held: list[ScheduleOp] = []
    for op in ops[1:]:
        piece = Piece(held, op)
        if not layout.is_message(op):
            held.append(op)
        elif op.kind is OpKind.JOIN and piece.work_ns > 0:
            pieces.append(Piece([], replace(op, own_ns=np.zeros(OWN_ROWS), host=_only_lag(op.host))))
            held = [*held, time_alone(_rows(op), op.host)]
        else:
            pieces.append(piece)
            held = []
    return pieces


def _only_lag(host: HostPart | None) -> HostPart | None:
    return host and HostPart.only_lag(host.lag_ns)


def _places_of_passes(steps: list[list[Piece]], wanted: int) -> list[list[int]]:
    """Places of the passes among the pieces of each step. Told by what each computes; where that gives another number
    than ``wanted`` in some step, as on hosts whose passes mostly run Python or sleep, by what is usual.
    """
    each = [_by_computation(pieces, wanted) for pieces in steps]
    return each if all(len(places) == wanted for places in each) else _by_usual_length(steps, wanted) or each


def _by_computation(pieces: list[Piece], wanted: int) -> list[int]:
    least = _APART * sum(piece.work_ns for piece in pieces) / max(wanted, 1)
    return [
        place
        for place, piece in enumerate(pieces)
        if piece.work_ns > least or any(op.rank_op is not None for op in piece.ops)
    ]


def _by_usual_length(steps: list[list[Piece]], wanted: int) -> list[list[int]] | None:
    """The longest after each message that is followed by a pass, in the median over the steps: all steps issue the same
    messages, though not each waits for all of them. None where passes are not plainly longer than what is no pass.
    """
    longest = [_longest_between_issues(pieces) for pieces in steps]
    if len({len(one) for one in longest}) != 1 or len(longest[0]) < wanted:
        return None
    usual = np.median([[pieces[place].own_ns for place in one] for pieces, one in zip(steps, longest, strict=True)], 0)
    order = np.argsort(-usual, kind="stable")
    if len(usual) > wanted and usual[order[wanted - 1]] < _LONGER * usual[order[wanted]]:
        return None
    chosen = sorted(order[:wanted].tolist())
    return [[one[number] for number in chosen] for one in longest]


def _longest_between_issues(pieces: list[Piece]) -> list[int]:
    """Place of the longest of the pieces that end with each message's issue or come after the one before it."""
    places: list[list[int]] = [[]]
    for at, piece in enumerate(pieces):
        places[-1].append(at)
        if piece.tail.kind is OpKind.ISSUE:
            places.append([])
    return [max(some, key=lambda at: pieces[at].own_ns) for some in places if some]


def _steps(layout: Layout, insides: Mapping[int, list[ScheduleOp]], works: list[str], what: str) -> list[StageStep]:
    """All steps of a rank, each divided at its messages; ``insides``: step -> its ops from the first message on."""
    every = [_pieces(layout, ops) for ops in insides.values()]
    places = _places_of_passes(every, len(works))
    found = next((len(one) for one in places if len(one) != len(works)), None)
    if found is not None:
        raise CannotReplay(f"{what} has {found} passes between messages, but its schedule needs {len(works)}")
    return [
        _step(pieces, those, ops[0], number, works)
        for (number, ops), pieces, those in zip(insides.items(), every, places, strict=True)
    ]


def _step(pieces: list[Piece], places: list[int], first: ScheduleOp, number: int, works: list[str]) -> StageStep:
    """Divide what is between the messages of one step, from the ``first`` on, into passes, at ``places``, and the
    exchanges' own time.
    """
    by_kind = grouped(zip(works, (pieces[place] for place in places), strict=True))
    exchanges: list[list[Piece]] = [[]]
    opening = [first]
    for at, piece in enumerate(pieces):
        if at in places:
            exchanges.append([])
            opening.append(piece.tail)
        else:
            exchanges[-1].append(piece)
    return StageStep(number, by_kind, _exchanges(exchanges, opening))


def _exchanges(every: list[list[Piece]], opening: list[ScheduleOp]) -> Exchanges:
    """``every`` exchange of a step; ``opening`` has the op that begins each."""
    rows = [np.sum([np.zeros(OWN_ROWS + HOST_ROWS), *(piece.rows_ns for piece in one)], axis=0) for one in every]
    each = np.median(rows, axis=0)
    once = np.maximum(np.sum(rows, axis=0) - len(rows) * each, 0.0)
    waits = grouped(
        wait for one, first in zip(every, opening, strict=True) for wait in _host_waits(_ops_of(one), first)
    )
    host = opening[0].host
    usual = {OpKind(kind): median(lags) for kind, lags in waits.items() if 2 * len(lags) >= len(every)}
    return Exchanges(time_alone(each, host), time_alone(once, host), usual)


def _ops_of(pieces: list[Piece]) -> list[ScheduleOp]:
    return [op for piece in pieces for op in (*piece.ops, piece.tail)]


def _host_waits(ops: list[ScheduleOp], first: ScheduleOp) -> list[tuple[OpKind, float]]:
    """What the host waits for in an exchange that ``first`` begins (SYNC, JOIN), and its lag. A wait for a message of
    an earlier exchange is none of this one's: a host far ahead of its device waits for a place in the launch queue.
    """
    issued = {op.issued for op in (first, *ops)}
    return [
        (op.kind, op.host.lag_ns)
        for op in ops
        if op.host is not None and (op.kind is OpKind.SYNC or (op.kind is OpKind.JOIN and op.rank_op in issued))
    ]


def _of_every_pass(steps: list[StageStep]) -> frozenset[int]:
    """Process groups with a collective in at least half of the passes: tensor parallel ones, none for gradients. What
    one of a step's passes has is for gradients, also where there are two.
    """
    every = [piece for step in steps for pieces in step.pieces.values() for piece in pieces]
    used: Counter[int] = Counter()
    for piece in every:
        used.update({own.collective.group for op in piece.ops if (own := op.issued) is not None})
    least = max(len(every) / 2, min(len(steps) + 1, len(every)))
    return frozenset(group for group, count in used.items() if count >= least)


def _like(step: StageStep, kind: str, name: str) -> tuple[float, float]:
    """Own time of a pass of that kind, and its host's, ns."""
    if not step.pieces.get(kind):
        raise CannotReplay(f"{name}: no pass between two messages shows how long one takes; record more micro-batches")
    rows = [piece.rows_ns for piece in step.pieces[kind]]
    return median(float(one[:OWN_ROWS].sum()) for one in rows), median(float(one[OWN_ROWS:].sum()) for one in rows)


def _divided(piece: Piece, wanted: tuple[float, float], *, at_end: bool) -> tuple[Piece, Piece]:
    """What is between two steps in two: the one at its end, else at its begin, is a pass of the ``wanted`` length (as
    of ``_like``). Marks, and batches before it, are no part of it.
    """
    parts = [*piece.ops, piece.tail]
    device, host = wanted
    place = len(parts) - 1 if at_end else 0
    stop = 0 if at_end else len(parts) - 1
    while place != stop and float(parts[place].own_ns.sum()) < device:
        if (parts[place - 1] if at_end else parts[place]).kind in (OpKind.MARK, OpKind.HOLD):
            break
        rows = _rows(parts[place])
        device, host = device - float(rows[:OWN_ROWS].sum()), host - float(rows[OWN_ROWS:].sum())
        place += -1 if at_end else 1
    rows = _rows(parts[place])
    own, hosts = float(rows[:OWN_ROWS].sum()), float(rows[OWN_ROWS:].sum())
    before, behind = parts[place].divided(device if at_end else own - device, hosts - host if at_end else host)
    left = [behind, *parts[place + 1 :]]
    return Piece(parts[:place], before), Piece(left[:-1], left[-1])


def _typical_message(
    ops: list[ScheduleOp], layout: Layout, peer: int, ends: Mapping[Collective, set[int]], *, sends: bool
) -> ScheduleOp:
    """An op that issues a message such as those to or from ``peer``; such as all where kernels carry several at once.
    What is sent has to be computed, whatever the recording shows of one that had long been.
    """
    every = [(own, op) for op in ops if (own := op.issued) is not None and layout.is_message(op)]
    alike = [(own, op) for own, op in every if ends[own.collective] == {own.rank, peer}] or every
    alike = [(own, op) for own, op in alike if own.sends is sends] or alike
    typical = sorted((own for own, _ in alike), key=lambda own: own.transfer_ns)[len(alike) // 2]
    begun = [_begun_with_the_device(own, op) for own, op in alike]
    model = replace(typical, gap_ns=median(gap_ns for _, gap_ns in begun))
    issue = ScheduleOp.of(OpKind.ISSUE, model, None)
    lags = [(lag_ns, op.host.lag_ns) for (lag_ns, _), (_, op) in zip(begun, alike, strict=True) if op.host is not None]
    if lags:
        issue.lag_ns, host_lag = (median(of_one) for of_one in zip(*lags, strict=True))
        issue.lag_ns = max(issue.lag_ns, 0.0) if sends else issue.lag_ns
        issue.host = HostPart.only_lag(host_lag)
    return issue


def _begun_with_the_device(message: RankOp, issue: ScheduleOp) -> tuple[float, float]:
    """(lag, gap) of a message that was ready before its device had come to it, and began only then: it waited."""
    waited = min(max(-issue.lag_ns, 0.0), message.gap_ns) if issue.host is not None and issue.lag_ns != NEVER else 0.0
    return issue.lag_ns + waited, message.gap_ns - waited


def _lanes(
    schedules: EditableSchedules, layout: Layout, messages: Mapping[tuple[int, bool], ScheduleOp]
) -> dict[tuple[int, bool], int]:
    """The stream for messages of each neighbouring stage and way: as recorded, one for several where those share it; or
    each its own, where several share a kernel.
    """
    lanes: dict[tuple[int, bool], int] = {}
    of_recorded: dict[int, int] = {}
    for way, issue in messages.items():
        assert issue.rank_op is not None
        lane = schedules.lanes if layout.at_once else of_recorded.setdefault(issue.rank_op.lane, schedules.lanes)
        lanes[way] = lane
        schedules.lanes += lane == schedules.lanes
    return lanes
