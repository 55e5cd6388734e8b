"""Which stage of the pipeline each rank holds.

In every step the first thing that a later stage does is to receive its first micro-batch from the stage before it; the
first stage sends before it receives anything. Ranks that exchange no messages have no stage::

    rank 0   send to 2                         sends first: stage 0
    rank 2   recv from 0, send to 4 …          after rank 0: stage 1
    rank 4   recv from 2, send to 2 …          after rank 2: stage 2

Ranges of micro-batches that name the stage take precedence. Where neither says, because ranks are missing from the
recording, neighbours that follow one another in their group's list of ranks have its order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from perfscope.analyzers.job.pipelines.messages import PipelineMessages, by_rank_and_step, pipeline_messages
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE

if TYPE_CHECKING:
    from perfscope.analyzers.job.aligned import AlignedJob


@dataclass(frozen=True)
class Placement:
    """``stage_of`` maps ranks to stages, 0 the first, those included that are only known as a peer.

    Stages are places in the pipeline: a rank that holds several chunks of the model holds one stage here. ``degree`` is
    the number of stages; None where not known.
    """

    stage_of: Mapping[int, int]
    degree: int | None


def stages(result: AlignedJob) -> dict[int, int]:
    """Recorded rank -> stage, 0 the first; empty where the job has no pipeline, or the order of ranks is not known."""
    placed = place(result, pipeline_messages(result)).stage_of
    return {rank: stage for rank, stage in placed.items() if rank in result.partials}


def ranks_of(stage_of: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Stage -> its ranks, ascending."""
    members = grouped((stage, rank) for rank, stage in sorted(stage_of.items()))
    return {stage: tuple(ranks) for stage, ranks in sorted(members.items())}


def place(result: AlignedJob, messages: PipelineMessages) -> Placement:
    """Place the ranks that exchange ``messages``; no rank where they do not follow one another."""
    if len(messages) == 0:
        return Placement({}, None)
    beside = _neighbours(messages)
    listed = _by_list(result, messages)
    degree = max(listed.values()) + 1 if listed else None
    stage_of = _by_ranges(result, beside) or _by_order(beside) or listed
    if not stage_of:
        return Placement({}, None)
    if any(stage_of[rank] != listed.get(rank, stage_of[rank]) for rank in stage_of):
        listed, degree = {}, None
    placed = {**listed, **_beside(stage_of, beside, degree), **stage_of}
    if len(set(placed.values())) < 2:
        return Placement({}, None)
    last = max(placed.values())
    # The last stage sends to no later one: a rank that is only known as a peer may not be the last.
    is_last = any(placed[rank] == last for rank in beside)
    return Placement(placed, degree or (last + 1 if is_last else None))


@dataclass(frozen=True)
class _Neighbours:
    """``giver``: the rank from which the first message of a step comes (NONE: this rank sends first). ``taker``: the
    other rank to which it first sends. None where not known, or where there is none.
    """

    giver: int | None
    taker: int | None


def _neighbours(messages: PipelineMessages) -> dict[int, _Neighbours]:
    """Of each rank, as in most steps."""
    givers: dict[int, Counter[int | None]] = {}
    takers: dict[int, Counter[int | None]] = {}
    for own in by_rank_and_step(messages):
        peer, sends = messages.peer[own.rows], messages.sends[own.rows]
        known = [int(other) if other != NONE else None for other in peer[:1]]
        givers.setdefault(own.rank, Counter())[NONE if sends[0] else known[0]] += 1
        sent = peer[sends][:1]
        takers.setdefault(own.rank, Counter())[int(sent[0]) if len(sent) and sent[0] != NONE else None] += 1
    neighbours = {}
    for rank, counts in givers.items():
        giver, taker = counts.most_common(1)[0][0], takers[rank].most_common(1)[0][0]
        neighbours[rank] = _Neighbours(giver, taker if taker != giver else None)
    return neighbours


def _by_ranges(result: AlignedJob, beside: Mapping[int, _Neighbours]) -> dict[int, int]:
    """By the lowest stage that the ranges of a rank's passes name; empty unless all ranks have such ranges."""
    named = {rank: result.partials[rank].passes.stage for rank in beside}
    if any(len(stage) == 0 or stage.min() == NONE for stage in named.values()):
        return {}
    return {rank: int(stage.min()) for rank, stage in named.items()}


def _by_order(beside: Mapping[int, _Neighbours]) -> dict[int, int]:
    """By the distance from the rank that sends first; empty unless every rank has one."""
    before = {rank: own.giver for rank, own in beside.items()}
    missing = Counter(own.taker for own in beside.values() if own.taker is not None and own.taker not in beside)
    for rank, own in beside.items():
        if own.taker is not None and missing[own.taker] == 1:
            before[own.taker] = rank
    stage_of: dict[int, int] = {}
    for rank in before:
        way: list[int] = [rank]
        while (giver := before.get(way[-1])) is not None and giver != NONE and giver not in way:
            way.append(giver)
        if before.get(way[-1]) == NONE:
            stage_of[rank] = len(way) - 1
    return stage_of if beside.keys() <= stage_of.keys() else {}


def _by_list(result: AlignedJob, messages: PipelineMessages) -> dict[int, int]:
    """By the order of the groups' lists of ranks, members that are not recorded included; empty unless every message
    passes between neighbours of its group's list, whose last and first are neighbours too.
    """
    matched = result.matched
    group = matched.instances.group[matched.instance[messages.line]]
    stage_of: dict[int, int] = {}
    for number in distinct(group).tolist():
        ranks = matched.instances.groups[number].ranks
        index = {rank: place for place, rank in enumerate(ranks)}
        known = (group == number) & (messages.peer != NONE)
        ways = {*zip(messages.rank[known].tolist(), messages.peer[known].tolist(), strict=True)}
        if not ranks or not all(
            one in index and other in index and abs(index[one] - index[other]) in (1, len(ranks) - 1)
            for one, other in ways
        ):
            return {}
        stage_of.update(index)
    return stage_of


def _beside(stage_of: Mapping[int, int], beside: Mapping[int, _Neighbours], degree: int | None) -> dict[int, int]:
    """Stages of ranks that are only known as a peer. After the last stage comes the first."""
    placed = {}
    for rank, own in beside.items():
        if own.giver is not None and own.giver != NONE:
            placed[own.giver] = stage_of[rank] - 1
        if own.taker is not None:
            following = stage_of[rank] + 1
            placed.setdefault(own.taker, following % degree if degree else following)
    return {rank: stage for rank, stage in placed.items() if stage >= 0}
