"""How a pipeline works through its micro-batches: how many, in how many chunks of the model per stage, in which order.

Ranges of micro-batches show it directly, then the settings that the run recorded. Else the messages show it. With p
stages, m micro-batches and v chunks per stage, m·v activations pass from each stage to the next, and m·(v-1) from the
last stage back to the first, where the next chunk begins. One forward, one backward (1F1B) keeps at most p-s
micro-batches on stage s that are not yet on their way back; with all forwards first (GPipe) it is all of them
(Narayanan et al., SC'21).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from statistics import median
from typing import Any, Final, TypeVar

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.pipelines.messages import PipelineMessages, StepMessages, by_rank_and_step
from perfscope.analyzers.job.pipelines.stages import Placement, ranks_of
from perfscope.analyzers.rank.partial import FORWARD, WEIGHTS, Passes
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.recording.metadata import RunMetadata
from perfscope.results.categories import TimeCategory
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Bool, Int64

UNKNOWN: Final = "unknown"

_NAMES: Final = {
    # Classes of torch.distributed.pipelining, and how collectors name those of others.
    "Schedule1F1B": "1f1b", "ScheduleGPipe": "gpipe", "ScheduleInterleaved1F1B": "interleaved",
    "ScheduleLoopedBFS": "interleaved", "ScheduleInterleavedZeroBubble": "zero_bubble",
    "ScheduleZBVZeroBubble": "zero_bubble", "ScheduleDualPipeV": "zero_bubble",
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved": "interleaved",
}  # fmt: skip

_LONGER: Final = 1.7
"""The last stage's computation over a forward, from which it held a backward too (which takes two to four times)."""

_APART: Final = 0.05
"""Computation between two messages, as a share of its mean between messages of that step, from which they do not belong
together: on a host, sending is an operator too, and passes of one kind may differ twentyfold there."""

_APART_IN_ALL: Final = 0.2
"""The same on CPUs of all its own time, where passes may mostly run Python or sleep, and sending takes some of that."""

_OWN: Final = (TimeCategory.COMPUTE, TimeCategory.SYNC, TimeCategory.LAUNCH, TimeCategory.HOST)

_RANKS: Final = 4
_STEPS: Final = 4
"""Ranks of each stage, and steps of each of them, that are examined: the others do the same."""

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value", bound=Hashable)


@dataclass(frozen=True)
class PipelineSchedule:
    """``microbatches`` per step, ``chunks`` of the model per stage; None where not known."""

    name: str = UNKNOWN
    microbatches: int | None = None
    chunks: int | None = None

    @property
    def whole(self) -> bool:
        """Everything is known."""
        return self.name != UNKNOWN and self.microbatches is not None and self.chunks is not None

    def completed(self, other: PipelineSchedule) -> PipelineSchedule:
        """This one, with what it does not know taken from ``other``."""
        return PipelineSchedule(
            other.name if self.name == UNKNOWN else self.name,
            other.microbatches if self.microbatches is None else self.microbatches,
            other.chunks if self.chunks is None else self.chunks,
        )


def find_schedule(
    result: AlignedJob, messages: PipelineMessages, placement: Placement, runs: Mapping[int, RunMetadata]
) -> PipelineSchedule:
    """By ranges, settings and messages, in this order."""
    schedule = PipelineSchedule()
    sources: tuple[Callable[[], PipelineSchedule], ...] = (
        lambda: _by_ranges(result, placement),
        lambda: _by_settings(runs),
        lambda: _by_messages(read_links(result, messages, placement.stage_of), placement.degree),
    )
    for source in sources if messages.directed else sources[:-1]:
        if not schedule.whole:
            schedule = schedule.completed(source())
    return schedule


def _by_ranges(result: AlignedJob, placement: Placement) -> PipelineSchedule:
    counts: list[tuple[int, int]] = []
    held: dict[int, int] = {}
    split = False
    for rank, partial in result.partials.items():
        own = partial.passes
        if len(own) == 0 or rank not in placement.stage_of:
            continue
        split |= bool((own.phase == WEIGHTS).any())
        used = partial.steps.indices_of(result.steps)
        for step in used.tolist():
            counts += _counted(own, step)
        held[placement.stage_of[rank]] = max(_most_held(own, step) for step in used.tolist())
    if not counts:
        return PipelineSchedule()
    microbatches, chunks = Counter(counts).most_common(1)[0][0]
    name = "zero_bubble" if split else _order(held, placement.degree, microbatches, chunks)
    return PipelineSchedule(name, microbatches, chunks)


def _counted(own: Passes, step: int) -> list[tuple[int, int]]:
    """(micro-batches, chunks) of one rank's step; nothing where it has no forward."""
    forward = (own.phase == FORWARD) & (own.step == step)
    numbers = len(distinct(own.microbatch[forward]))
    if numbers == 0:
        return []
    stages = distinct(own.stage[forward])
    # Where ranges do not name the stage, each micro-batch's come once for every chunk.
    chunks = len(stages) if stages[0] != NONE else int(forward.sum()) // numbers
    return [(numbers, chunks)]


def _most_held(own: Passes, step: int) -> int:
    """The most micro-batches whose forward had run and whose backward had not."""
    mine = (own.step == step) & (own.phase != WEIGHTS)
    return int(np.cumsum(np.where(own.phase[mine] == FORWARD, 1, -1)).max(initial=0))


def _by_settings(runs: Mapping[int, RunMetadata]) -> PipelineSchedule:
    for run in runs.values():
        settings: dict[str, Any] = run.settings.get("pipeline", {})
        if settings:
            return PipelineSchedule(
                _NAMES.get(str(settings.get("schedule", "")), UNKNOWN),
                _positive(settings.get("microbatches")),
                _positive(settings.get("virtual_stages")),
            )
    return PipelineSchedule()


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _by_messages(links: Links, degree: int | None) -> PipelineSchedule:
    if degree is None:
        return PipelineSchedule()
    if degree == 2:
        microbatches, chunks = _two_stages(links)
    else:
        microbatches, chunks = _more_stages(links, degree) if links.complete else _by_sums(links, degree)
    if microbatches is None or chunks is None:
        return PipelineSchedule()
    return PipelineSchedule(_order(links.held, degree, microbatches, chunks), microbatches, chunks)


def _more_stages(links: Links, degree: int) -> tuple[int | None, int | None]:
    """m·v activations to the next stage, m·(v-1) from the last to the first."""
    last = degree - 1
    onward = [links.passed[stage, stage + 1] for stage in range(last) if (stage, stage + 1) in links.passed]
    if not onward:
        return None, None
    total = int(median(onward))
    ends_seen = (last, 0) in links.passed or not links.sent.keys().isdisjoint({0, last})
    # A stage in between holds p-s micro-batches of one chunk, and more of several chunks.
    one_chunk = any(most == degree - stage < total - 1 for stage, most in links.held.items() if stage)
    return _split(total, links.passed.get((last, 0), 0)) if ends_seen or one_chunk else (None, None)


def _by_sums(links: Links, degree: int) -> tuple[int | None, int | None]:
    """The stages at the ends send m·(2v-1) messages, those in between 2·m·v, to any rank."""
    ends = [links.sent[stage] for stage in (0, degree - 1) if stage in links.sent]
    between = [count for stage, count in links.sent.items() if 0 < stage < degree - 1]
    if not ends or not between:
        return None, None
    total = int(median(between)) // 2
    return _split(total, int(median(ends)) - total)


def _split(onward: int, around: int) -> tuple[int | None, int | None]:
    """(m, v) by m·v and m·(v-1)."""
    microbatches = onward - around
    fits = microbatches > 0 and onward % microbatches == 0
    return (microbatches, onward // microbatches) if fits else (None, None)


def _two_stages(links: Links) -> tuple[int | None, int | None]:
    """Either stage sends m·(2v-1) messages, so that only the computation in between distinguishes chunks from
    micro-batches.

    Without chunks the last stage has been through a backward when it first sends. With them it first sends on what its
    chunks but the last put out, in turns of two micro-batches, or of all (breadth first).
    """
    first, last, count = links.computed.get(0), links.computed.get(1), links.sent.get(0, 0)
    if not first or not last:
        return None, None
    if last[0] >= _LONGER * first[0]:
        return links.passed.get((0, 1)), 1
    forwards = next((place for place, took in enumerate(last) if took >= _LONGER * median(last[:place] or [took])), 0)
    for turns in (2, count - 2 * forwards):
        chunks = forwards // turns + 1 if turns > 0 and forwards % turns == 0 else 1
        if chunks > 1 and count % (2 * chunks - 1) == 0:
            return count // (2 * chunks - 1), chunks
    return None, None


def _order(held: Mapping[int, int], degree: int | None, microbatches: int, chunks: int) -> str:
    """By how many micro-batches each stage holds that are not on their way back. Recvs may be issued one ahead: stages
    for which one more makes no difference count first.
    """
    if chunks > 1:
        return "interleaved"
    for ahead in (1, 0):
        for stage, most in sorted(held.items(), reverse=True):
            if degree is not None and microbatches > degree - stage + ahead:
                return "gpipe" if most >= microbatches else "1f1b" if most <= degree - stage + ahead else UNKNOWN
    return UNKNOWN


@dataclass(frozen=True)
class Links:
    """The messages between the stages, as in most steps and on most ranks of a stage.

    ``passed``: (from stage, to stage) -> how often something is passed on. ``held``: stage -> the most micro-batches
    that had come to it and were not yet on their way back, as far as it receives from one side and answers there.
    ``sent``: stage -> messages that it sends to any rank. ``complete``: the stage at the other end is known for all
    messages. ``computed``: stage -> ns computed before each of its sends, in one step.
    """

    passed: Mapping[tuple[int, int], int]
    held: Mapping[int, int]
    sent: Mapping[int, int]
    complete: bool
    computed: Mapping[int, tuple[int, ...]]


def read_links(result: AlignedJob, messages: PipelineMessages, stage_of: Mapping[int, int]) -> Links:
    """The links by the messages of some ranks and steps.

    What a rank sends or receives with no computation in between belongs together: the tensors of one micro-batch, or an
    activation sent as a gradient is received.
    """
    recorded = ranks_of({rank: stage for rank, stage in stage_of.items() if rank in result.partials})
    examined = {rank for ranks in recorded.values() for rank in ranks[:_RANKS]}
    steps = set(result.steps[:_STEPS].tolist())
    done = _done(result, messages, examined)
    passed: list[tuple[tuple[int, int], int]] = []
    held: list[tuple[int, int]] = []
    sent: list[tuple[int, int]] = []
    computed: dict[int, tuple[int, ...]] = {}
    for own in by_rank_and_step(messages):
        if own.rank not in examined or own.step not in steps:
            continue
        stage = stage_of[own.rank]
        turns = _turns(messages, own, done, stage_of)
        passed += turns.passed(stage)
        held.append((stage, turns.most_held(stage)))
        sent.append((stage, int(messages.sends[own.rows].sum())))
        computed.setdefault(stage, turns.computed_before_sends())
    complete = bool(messages.peer_known.all()) and set(distinct(messages.peer).tolist()) <= set(stage_of)
    return Links(_most(passed), _most(held), _most(sent), complete, computed)


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
        """How often this stage sends to each other one, and receives from it."""
        counts = []
        for other in distinct(self.other[self.other != NONE]).tolist():
            for way in (0, 1):
                count = len(distinct(self.turn[(self.other == other) & (self.sends == way)]))
                if count:
                    counts.append(((stage, other) if way else (other, stage), count))
        return counts

    def most_held(self, stage: int) -> int:
        """A micro-batch comes with what the stage before sends and leaves with what that is sent; for the first stage
        it is what it sends to the next and what it gets from there.
        """
        beside, comes = (stage - 1, 0) if stage else (1, 1)
        mine = self.other == beside
        count = np.zeros(int(self.turn.max()) + 1, dtype=np.int64)
        # Once per turn and way, however many tensors.
        for way in (0, 1):
            turns = distinct(self.turn[mine & (self.sends == way)])
            count[turns] += 1 if way == comes else -1
        return int(np.cumsum(count).max(initial=0))

    def computed_before_sends(self) -> tuple[int, ...]:
        """Ns computed since the send before, or since the first message came."""
        sending = np.flatnonzero(self.sends == 1)
        _, first = np.unique(self.turn[sending], return_index=True)
        at = self.done_ns[sending[first]]
        since = 0 if len(sending) and sending[0] == 0 else int(self.done_ns[0])
        return tuple(np.diff(at, prepend=since).tolist())


def _turns(messages: PipelineMessages, own: StepMessages, done: _Done, stage_of: Mapping[int, int]) -> _Turns:
    done_ns = done.computed_ns[own.rows]
    between = np.diff(done_ns)
    apart = _longer_than(_APART, between) | _longer_than(_APART_IN_ALL, np.diff(done.own_ns[own.rows]))
    other = np.array([stage_of.get(peer, NONE) for peer in messages.peer[own.rows].tolist()], dtype=np.int64)
    turn = np.concatenate(([0], np.cumsum(apart))).astype(np.int64)
    return _Turns(turn, other, messages.sends[own.rows].astype(np.int64), done_ns)


def _longer_than(share: float, between: Int64) -> Bool:
    """Which of these lengths are more than this share of their mean?"""
    return np.asarray(between > share * between.sum() / max(len(between), 1))


@dataclass(frozen=True)
class _Done:
    """What each message's rank had done in the step when it began, ns: computed, and in all on its own account (0
    beside a device, whose host may be far ahead); 0 for ranks that are not examined.
    """

    computed_ns: Int64
    own_ns: Int64


def _done(result: AlignedJob, messages: PipelineMessages, ranks: Iterable[int]) -> _Done:
    done = _Done(np.zeros(len(messages), dtype=np.int64), np.zeros(len(messages), dtype=np.int64))
    for rank in ranks:
        mine = np.flatnonzero(messages.rank == rank)
        begin = result.windows[rank][0][np.searchsorted(result.steps, messages.step[mine])]
        of: list[tuple[Int64, tuple[TimeCategory, ...]]] = [(done.computed_ns, (TimeCategory.COMPUTE,))]
        if not result.partials[rank].has_device_work:
            of.append((done.own_ns, _OWN))
        for column, categories in of:
            time = result.timelines[rank].where(*categories)
            column[mine] = time.before(messages.start_ns[mine]) - time.before(begin)
    return done


def _most(counts: Iterable[tuple[_Key, _Value]]) -> dict[_Key, _Value]:
    """The commonest value of each key."""
    return {key: Counter(values).most_common(1)[0][0] for key, values in grouped(counts).items()}
