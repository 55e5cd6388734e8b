"""Process groups and messages as simulators name them: groups by numbers, messages by tags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from perfscope.analyzers.export.et_def import CollectiveType
from perfscope.frozen import dataclass

COLLECTIVES: Final[Mapping[str, CollectiveType]] = {
    "all_reduce": CollectiveType.ALL_REDUCE,
    "reduce": CollectiveType.REDUCE,
    "all_gather": CollectiveType.ALL_GATHER,
    "gather": CollectiveType.GATHER,
    "scatter": CollectiveType.SCATTER,
    "broadcast": CollectiveType.BROADCAST,
    "all_to_all": CollectiveType.ALL_TO_ALL,
    "reduce_scatter": CollectiveType.REDUCE_SCATTER,
    # NCCL's barrier is an all-reduce of one element, and simulators have no other.
    "barrier": CollectiveType.ALL_REDUCE,
}
"""torch.distributed's kind of a collective -> the schema's."""

SIMULATED: Final = frozenset(
    (
        CollectiveType.ALL_REDUCE,
        CollectiveType.ALL_GATHER,
        CollectiveType.ALL_TO_ALL,
        CollectiveType.REDUCE_SCATTER,
        CollectiveType.BROADCAST,
    )
)
"""What ASTRA-sim accepts; it stops at any other collective."""


class Communicators:
    """Numbers the groups of a job, from 1. The first of all its ranks needs none: it is what simulators assume.

    Two groups of the same ranks are two: simulators pair a group's collectives in the order of issue, which only a
    communicator of its own keeps.
    """

    def __init__(self, world: Iterable[int]) -> None:
        self._world = tuple(sorted(world))
        self._first: str | None = None
        self._numbers: dict[tuple[tuple[int, ...], str], int] = {}

    def name_of(self, ranks: Sequence[int], label: str) -> str:
        """The group's name in ``comm_group.json``; empty for that of all ranks. ``label`` tells apart those alike."""
        members = tuple(sorted(ranks))
        if members == self._world and self._first in (None, label):
            self._first = label
            return ""
        return str(self._numbers.setdefault((members, label), len(self._numbers) + 1))

    def document(self) -> dict[str, list[int]]:
        """``comm_group.json``: name -> ranks."""
        return {str(number): list(members) for (members, _), number in self._numbers.items()}


@dataclass(frozen=True)
class Message:
    """One end of a message on one rank: ``part`` is the rank's part in communication that carries it.

    ``tag`` is None where the other end is recorded, but not in the steps that are exported.
    """

    part: int
    source: int
    destination: int
    bytes: int | None
    tag: int | None


@dataclass(frozen=True)
class MessageEnd:
    """One end of a message before it has a tag; ``instance`` is the same number at both ends."""

    rank: int
    part: int
    instance: int
    source: int
    destination: int
    bytes: int | None

    @property
    def sent(self) -> bool:
        """Is this the sender's end?"""
        return self.rank == self.source


def tagged(ends: Sequence[MessageEnd], recorded: frozenset[int]) -> dict[int, list[Message]]:
    """Rank -> its messages, with tags that are equal at both ends of one and differ between two of one direction.

    Those of one exchange between two ranks are paired in the order of issue.
    """
    ordered = sorted(ends, key=lambda end: end.instance)
    there = Counter(_OneWay(end.instance, end.source, end.destination, end.sent) for end in ordered)
    seen: Counter[_OneWay] = Counter()
    used: Counter[tuple[int, int]] = Counter()
    tags: dict[tuple[int, int, int, int], int] = {}
    messages: dict[int, list[Message]] = {}
    for end in ordered:
        side = _OneWay(end.instance, end.source, end.destination, end.sent)
        place = seen[side]
        seen[side] += 1
        tag = None
        if not {end.source, end.destination} <= recorded or place < there[side._replace(sent=not end.sent)]:
            direction = (end.source, end.destination)
            key = (end.instance, *direction, place)
            if key not in tags:
                tags[key] = used[direction]
                used[direction] += 1
            tag = tags[key]
        messages.setdefault(end.rank, []).append(Message(end.part, end.source, end.destination, end.bytes, tag))
    return messages


class _OneWay(NamedTuple):
    """One side of the messages of one direction in an exchange."""

    instance: int
    source: int
    destination: int
    sent: bool
