"""Which pipeline stage each rank holds, by who hands work to whom.

In every step the first thing that a later stage does is to receive its first micro-batch from the stage before it; the
first stage sends before it receives anything. Ranks that exchange no messages have no stage::

    rank 0   send to 2                         sends first: stage 0
    rank 2   receive from 0, send to 4 …       after rank 0: stage 1
    rank 4   receive from 2, send to 2 …       after rank 2: stage 2

Ranges of micro-batches that name the stage say it outright. Where neither tells, because ranks are missing from the
recording, neighbours that follow one another in their group's list of ranks have its order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.pipelines.messages import PipelineMessages, lanes, pipeline_messages
from perfscope.trace import NONE, Bool


@dataclass(frozen=True)
class Placement:
    """``stage_of`` maps ranks to stages, 0 the first, those included that are only known as somebody's peer.

    Stages are places in the pipeline: a rank that holds several chunks of the model holds one stage here. ``degree`` is
    how many there are in all; None where that is not known.
    """

    stage_of: Mapping[int, int]
    degree: int | None


def stages(result: Comparison) -> dict[int, int]:
    """Recorded rank -> stage, 0 the first; empty where the job has no pipeline, or who follows whom is not known."""
    found = place(result, pipeline_messages(result))
    return {rank: stage for rank, stage in found.stage_of.items() if rank in result.partials}


def ranks_of(stage_of: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Stage -> its ranks, ascending."""
    found: dict[int, list[int]] = {}
    for rank, stage in sorted(stage_of.items()):
        found.setdefault(stage, []).append(rank)
    return {stage: tuple(ranks) for stage, ranks in sorted(found.items())}


def place(result: Comparison, messages: PipelineMessages) -> Placement:
    """Place the ranks that pass ``messages`` on; nobody where they do not follow one another."""
    if len(messages) == 0:
        return Placement({}, None)
    beside = _neighbours(messages)
    listed = _by_list(result, messages)
    degree = max(listed.values()) + 1 if listed else None
    found = _by_ranges(result, beside) or _by_order(beside) or listed
    if not found:
        return Placement({}, None)
    if any(found[rank] != listed.get(rank, found[rank]) for rank in found):
        listed, degree = {}, None
    placed = {**listed, **_beside(found, beside, degree), **found}
    if len(set(placed.values())) < 2:
        return Placement({}, None)
    last = max(placed.values())
    # The last stage hands work on to nobody: whoever is known as a peer only may not be the last.
    is_last = any(placed[rank] == last for rank in beside)
    return Placement(placed, degree or (last + 1 if is_last else None))


@dataclass(frozen=True)
class _Neighbours:
    """Whom a rank receives its first message of a step from (NONE: it sends first), and whom it first sends one that is
    no answer to that; None where the recording does not say, or there is none.
    """

    giver: int | None
    taker: int | None


def _neighbours(messages: PipelineMessages) -> dict[int, _Neighbours]:
    """By what holds in most steps."""
    givers: dict[int, Counter[int | None]] = {}
    takers: dict[int, Counter[int | None]] = {}
    for lane in lanes(messages):
        peer, sends = messages.peer[lane.rows], messages.sends[lane.rows]
        known = [int(other) if other != NONE else None for other in peer[:1]]
        givers.setdefault(lane.rank, Counter())[NONE if sends[0] else known[0]] += 1
        sent = peer[sends][:1]
        takers.setdefault(lane.rank, Counter())[int(sent[0]) if len(sent) and sent[0] != NONE else None] += 1
    found = {}
    for rank, counts in givers.items():
        giver, taker = counts.most_common(1)[0][0], takers[rank].most_common(1)[0][0]
        found[rank] = _Neighbours(giver, taker if taker != giver else None)
    return found


def _by_ranges(result: Comparison, beside: Mapping[int, _Neighbours]) -> dict[int, int]:
    """By the lowest stage that the ranges of a rank's passes name; empty unless those of all ranks do."""
    named = {rank: result.partials[rank].passes.stage for rank in beside}
    if any(len(stage) == 0 or stage.min() == NONE for stage in named.values()):
        return {}
    return {rank: int(stage.min()) for rank, stage in named.items()}


def _by_order(beside: Mapping[int, _Neighbours]) -> dict[int, int]:
    """By the way from the rank that sends first; empty unless all ranks lie on one."""
    before = {rank: own.giver for rank, own in beside.items()}
    missing = Counter(own.taker for own in beside.values() if own.taker is not None and own.taker not in beside)
    for rank, own in beside.items():
        if own.taker is not None and missing[own.taker] == 1:
            before[own.taker] = rank
    found: dict[int, int] = {}
    for rank in before:
        way: list[int] = [rank]
        while (giver := before.get(way[-1])) is not None and giver != NONE and giver not in way:
            way.append(giver)
        if before.get(way[-1]) == NONE:
            found[rank] = len(way) - 1
    return found if beside.keys() <= found.keys() else {}


def _by_list(result: Comparison, messages: PipelineMessages) -> dict[int, int]:
    """By the order of the groups' lists of ranks, members that are not recorded included; empty unless every message
    passes between neighbours of its group's list, whose last and first are neighbours too.
    """
    matched = result.matched
    group = matched.instances.group[matched.instance[messages.line]]
    found: dict[int, int] = {}
    for number in np.unique(group).tolist():
        ranks = matched.instances.groups[number].ranks
        index = {rank: place for place, rank in enumerate(ranks)}
        ways = {(int(one), int(other)) for one, other in zip(*_ends(messages, group == number), strict=True)}
        if not ranks or not all(
            one in index and other in index and abs(index[one] - index[other]) in (1, len(ranks) - 1)
            for one, other in ways
        ):
            return {}
        found.update(index)
    return found


def _ends(messages: PipelineMessages, chosen: Bool) -> tuple[list[int], list[int]]:
    told = chosen & (messages.peer != NONE)
    return messages.rank[told].tolist(), messages.peer[told].tolist()


def _beside(found: Mapping[int, int], beside: Mapping[int, _Neighbours], degree: int | None) -> dict[int, int]:
    """Stages of ranks that are known as somebody's peer only. After the last stage comes the first."""
    placed = {}
    for rank, own in beside.items():
        if own.giver is not None and own.giver != NONE:
            placed[own.giver] = found[rank] - 1
        if own.taker is not None:
            following = found[rank] + 1
            placed.setdefault(own.taker, following % degree if degree else following)
    return {rank: stage for rank, stage in placed.items() if stage >= 0}
