"""How much passes between the stages of a pipeline in a step, and in which order.

What a rank sends or receives with no computation in between belongs together: the tensors of one micro-batch, or an
activation sent as a gradient is received.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.pipelines.messages import Lane, PipelineMessages, lanes
from perfscope.analyzers.pipelines.stages import ranks_of
from perfscope.analyzers.timeline import Row
from perfscope.trace import NONE, Int64

_APART: Final = 0.05
"""Computation between two messages, as a share of its mean between messages of that step, from which they do not belong
together: on a host handing a message over is an operator too, and passes of one kind may differ twentyfold there."""

_RANKS: Final = 4
_STEPS: Final = 4
"""Ranks of each stage, and steps of each of them, that are looked at: the others do as they do."""

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value", bound=Hashable)


@dataclass(frozen=True)
class Links:
    """What holds in most steps and on most ranks of a stage.

    ``passed``: (from stage, to stage) -> how often something is passed on. ``held``: stage -> the most micro-batches
    that had come to it and were not yet on their way back, as far as it receives from one side and answers there.
    ``sent``: stage -> messages that it sends, whoever to. ``told``: the stage at the
    other end is known of all messages. ``computed``:
    stage -> ns computed before each time that it sends something, in one step.
    """

    passed: Mapping[tuple[int, int], int]
    held: Mapping[int, int]
    sent: Mapping[int, int]
    told: bool
    computed: Mapping[int, tuple[int, ...]]


def read_links(result: Comparison, messages: PipelineMessages, stage_of: Mapping[int, int]) -> Links:
    """Read the messages of some ranks and steps."""
    looked_at = {rank for ranks in ranks_of(stage_of).values() for rank in _recorded(result, ranks)[:_RANKS]}
    steps = set(result.steps[:_STEPS].tolist())
    done = _computed_ns(result, messages, looked_at)
    passed: list[tuple[tuple[int, int], int]] = []
    held: list[tuple[int, int]] = []
    sent: list[tuple[int, int]] = []
    computed: dict[int, tuple[int, ...]] = {}
    for lane in lanes(messages):
        if lane.rank not in looked_at or lane.step not in steps:
            continue
        stage = stage_of[lane.rank]
        turns = _turns(messages, lane, done, stage_of)
        passed += turns.passed(stage)
        held.append((stage, turns.most_held(stage)))
        sent.append((stage, int(messages.sends[lane.rows].sum())))
        computed.setdefault(stage, turns.computed_before_sends())
    told = bool(messages.told.all()) and set(np.unique(messages.peer).tolist()) <= set(stage_of)
    return Links(_most(passed), _most(held), _most(sent), told, computed)


@dataclass(frozen=True, eq=False)
class _Turns:
    """One rank's messages of a step: ``turn`` numbers what belongs together, ``other`` is the stage at the other end
    (NONE: not known), ``done_ns`` what the rank had computed when each began.
    """

    turn: Int64
    other: Int64
    sends: Int64
    done_ns: Int64

    def passed(self, stage: int) -> list[tuple[tuple[int, int], int]]:
        """How often something goes from this stage to each other one, or comes from there."""
        found = []
        for other in np.unique(self.other[self.other != NONE]).tolist():
            for way in (0, 1):
                count = len(np.unique(self.turn[(self.other == other) & (self.sends == way)]))
                if count:
                    found.append(((stage, other) if way else (other, stage), count))
        return found

    def most_held(self, stage: int) -> int:
        """A micro-batch comes with what the stage before sends and leaves with what that is sent; for the first stage
        it is what it sends to the next and what it gets from there.
        """
        beside, comes = (stage - 1, 0) if stage else (1, 1)
        mine = self.other == beside
        count = np.zeros(int(self.turn.max()) + 1, dtype=np.int64)
        # Once a turn and way, however many tensors.
        for way in (0, 1):
            turns = np.unique(self.turn[mine & (self.sends == way)])
            count[turns] += 1 if way == comes else -1
        return int(np.cumsum(count).max(initial=0))

    def computed_before_sends(self) -> tuple[int, ...]:
        """Ns computed since the send before, or since the first message came."""
        sending = np.flatnonzero(self.sends == 1)
        _, first = np.unique(self.turn[sending], return_index=True)
        at = self.done_ns[sending[first]]
        since = 0 if len(sending) and sending[0] == 0 else int(self.done_ns[0])
        return tuple(np.diff(at, prepend=since).tolist())


def _turns(messages: PipelineMessages, lane: Lane, done: Int64, stage_of: Mapping[int, int]) -> _Turns:
    own = done[lane.rows]
    between = np.diff(own)
    apart = between > _APART * (own[-1] - own[0]) / max(len(between), 1)
    other = np.array([stage_of.get(peer, NONE) for peer in messages.peer[lane.rows].tolist()], dtype=np.int64)
    turn = np.concatenate(([0], np.cumsum(apart))).astype(np.int64)
    return _Turns(turn, other, messages.sends[lane.rows].astype(np.int64), own)


def _recorded(result: Comparison, ranks: Iterable[int]) -> list[int]:
    return [rank for rank in ranks if rank in result.partials]


def _computed_ns(result: Comparison, messages: PipelineMessages, ranks: Iterable[int]) -> Int64:
    """What these ranks had computed in the step when each of their messages began, ns; 0 for the others'."""
    done = np.zeros(len(messages), dtype=np.int64)
    for rank in ranks:
        mine = np.flatnonzero(messages.rank == rank)
        compute = result.timelines[rank].where(Row.COMPUTE)
        begin = result.windows[rank][0][np.searchsorted(result.steps, messages.step[mine])]
        done[mine] = compute.before(messages.start_ns[mine]) - compute.before(begin)
    return done


def _most(counts: Iterable[tuple[_Key, _Value]]) -> dict[_Key, _Value]:
    """The commonest value of each key."""
    found: dict[_Key, Counter[_Value]] = {}
    for key, value in counts:
        found.setdefault(key, Counter())[value] += 1
    return {key: values.most_common(1)[0][0] for key, values in found.items()}
