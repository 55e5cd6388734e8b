"""Values of matching: the ranks' parts in collectives with one numbering for the job, and what cannot be matched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from perfscope.analyzers.rank.collectives.collectives import POINT_TO_POINT, Group
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.text import ranks_in_words
from perfscope.trace.trace import Bool, Int64


@dataclass(frozen=True, eq=False)
class MessageEnds:
    """Every message as one of its two ranks recorded it: parallel arrays, by rank and in each rank's order of issue.

    ``op`` is the rank op that carries it; ``source`` and ``destination`` are global ranks (NONE: not recorded).
    ``sent``: recorded by the sender.
    """

    op: Int64
    source: Int64
    destination: Int64
    sent: Bool
    bytes: Int64

    def __len__(self) -> int:
        return len(self.op)


@dataclass(frozen=True, eq=False)
class UnmatchedOps:
    """The ranks' parts in collectives: parallel arrays, by rank and in each rank's order of start.

    ``index`` is the row in the rank's ``Collectives``. Times are on the ranks' own clocks. ``group``, ``kind`` and
    ``dtype`` (NONE: unknown) index the tuples; ``step`` is the job's step number.
    """

    rank: Int64
    index: Int64
    start_ns: Int64
    end_ns: Int64
    group: Int64
    kind: Int64
    dtype: Int64
    bytes: Int64
    step: Int64
    sequence: Int64
    on_host: Bool
    groups: tuple[Group, ...]
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    messages: MessageEnds
    recorded: Mapping[int, Int64]
    """Rank (ascending) -> those of the wanted steps that it has recorded."""

    def __len__(self) -> int:
        return len(self.rank)

    def mismatch(self, row: int, text: str, ranks: tuple[int, ...] = ()) -> Mismatch:
        """A mismatch in the group and step of one of the rank ops."""
        return Mismatch(self.groups[int(self.group[row])].name, int(self.step[row]), text, ranks)

    def is_kind(self, kinds: Sequence[str]) -> Bool:
        """Which are of these kinds."""
        return np.array([kind in kinds for kind in self.kinds] or [False], dtype=np.bool_)[self.kind]

    @property
    def one_way(self) -> Bool:
        """Which are between two ranks, or may be: kernels for sends and recvs of which nothing else is known."""
        return self.is_kind(POINT_TO_POINT)

    @property
    def expected(self) -> Int64:
        """Ranks that take part in a collective of each group; 0 where not known."""
        return np.array([len(group.ranks) or group.size or 0 for group in self.groups] or [0], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class MessagePairs:
    """Messages of which both ends are in the recording: parallel arrays. Ends are rank ops."""

    sender: Int64
    receiver: Int64
    bytes: Int64

    def __len__(self) -> int:
        return len(self.sender)

    def and_(self, more: MessagePairs) -> MessagePairs:
        """These and then ``more``."""
        return MessagePairs(
            np.concatenate((self.sender, more.sender)),
            np.concatenate((self.receiver, more.receiver)),
            np.concatenate((self.bytes, more.bytes)),
        )


@dataclass(frozen=True)
class Mismatch:
    """Collectives that cannot be matched: a group in which ranks issued different sequences in one step.

    ``ranks`` are those that differ from most of the group.
    """

    group: str
    step: int
    text: str
    ranks: tuple[int, ...] = ()


def by_value(values: Mapping[int, object]) -> tuple[str, tuple[int, ...]]:
    """(``ranks 0-6: 3, rank 7: 2``, the ranks that do not have the commonest value), for a value of each rank."""
    owners = grouped((values[rank], rank) for rank in sorted(values))
    text = ", ".join(
        f"{ranks_in_words(ranks)}: {value}" for value, ranks in sorted(owners.items(), key=lambda item: item[1])
    )
    most = max(owners.values(), key=len)
    return text, tuple(sorted(set(values) - set(most)))


def called(kind: str, size: int) -> str:
    """A collective in words; its size where known (not below 0)."""
    return f"{kind} of {size} bytes" if size >= 0 else kind
