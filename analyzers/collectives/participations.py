"""All ranks' collectives side by side, with one numbering of groups, kinds and types for the whole job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfscope.analyzers.collectives.communication import POINT_TO_POINT, Group, Messages
from perfscope.analyzers.collectives.groups import unite
from perfscope.analyzers.rank import RankPartial
from perfscope.trace import NONE, Bool, Int64


@dataclass(frozen=True, eq=False)
class MessageEnds:
    """Every message as one of its two ranks recorded it: parallel arrays, by rank and in each rank's order of issue.

    ``part`` is the participation that carries it; ``source`` and ``destination`` are global ranks (NONE: not said).
    ``sent`` tells whose record it is.
    """

    part: Int64
    source: Int64
    destination: Int64
    sent: Bool
    bytes: Int64

    def __len__(self) -> int:
        return len(self.part)


@dataclass(frozen=True, eq=False)
class Participations:
    """Parallel arrays, by rank and in each rank's order of start. ``index`` is the row in the rank's ``Collectives``.

    Times are on the ranks' own clocks. ``group``, ``kind`` and ``dtype`` (NONE: unknown) index the tuples; ``step`` is
    the job's step number.
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

    @property
    def one_way(self) -> Bool:
        """Which pass between two ranks, or may: kernels for sends and receipts of which nothing else is known."""
        kinds = np.array([kind in POINT_TO_POINT for kind in self.kinds] or [False], dtype=np.bool_)
        return kinds[self.kind]

    @property
    def expected(self) -> Int64:
        """Ranks that take part in a collective of each group; 0 where not known."""
        return np.array([len(group.ranks) or group.size or 0 for group in self.groups] or [0], dtype=np.int64)


def gather(partials: Mapping[int, RankPartial], steps: Int64) -> Participations:
    """The collectives that the ranks issued in ``steps``."""
    groups, places = unite({rank: partials[rank].collectives.groups for rank in partials})
    kinds: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    columns: list[dict[str, NDArray[Any]]] = []
    ends: list[dict[str, NDArray[Any]]] = []
    count = 0
    for rank in sorted(partials):
        own, number = partials[rank].collectives, partials[rank].steps.number
        step = np.where(own.step >= 0, number[np.maximum(own.step, 0)], NONE)
        kept = np.flatnonzero(np.isin(step, steps))
        group = np.array(places[rank], dtype=np.int64)
        kind = np.array([kinds.setdefault(each, len(kinds)) for each in own.kinds], dtype=np.int64)
        dtype = np.array([dtypes.setdefault(each, len(dtypes)) for each in own.dtypes] + [NONE], dtype=np.int64)
        columns.append({
            "rank": np.full(len(kept), rank, dtype=np.int64), "index": kept, "start_ns": own.start_ns[kept],
            "end_ns": own.end_ns[kept], "group": group[own.group[kept]], "kind": kind[own.kind[kept]],
            "dtype": dtype[own.dtype[kept]], "bytes": own.bytes[kept], "step": step[kept],
            "sequence": own.sequence[kept], "on_host": np.full(len(kept), own.on_host, dtype=np.bool_),
        })  # fmt: skip
        part = np.full(len(own), NONE, dtype=np.int64)
        part[kept] = count + np.arange(len(kept))
        ends.append(_ends(rank, own.messages, part))
        count += len(kept)
    joined = _joined(columns)
    messages = MessageEnds(**_joined(ends))
    return Participations(
        **joined,
        groups=groups,
        kinds=tuple(kinds),
        dtypes=tuple(dtypes),
        messages=_with_only_peers(messages, joined["group"], joined["rank"], groups),
        recorded={rank: steps[np.isin(steps, partials[rank].steps.number)] for rank in sorted(partials)},
    )


def _joined(columns: Sequence[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate([each[name] for each in columns]) for name in columns[0]}


def _ends(rank: int, own: Messages, part: Int64) -> dict[str, NDArray[Any]]:
    """One rank's ends of messages, ``part`` being the participation of each of its collectives (NONE: left out)."""
    part = part[own.collective]
    kept = part != NONE
    peer, sends = own.peer[kept], own.sends[kept]
    return {
        "part": part[kept],
        "source": np.where(sends, rank, peer),
        "destination": np.where(sends, peer, rank),
        "sent": sends,
        "bytes": own.bytes[kept],
    }


def _with_only_peers(ends: MessageEnds, group: Int64, rank: Int64, groups: Sequence[Group]) -> MessageEnds:
    """With the peers that go without saying: in a group of two there is but one."""
    sums = np.array([sum(each.ranks) if len(each.ranks) == 2 else NONE for each in groups] or [NONE], dtype=np.int64)
    other = sums[group[ends.part]]
    other = np.where(other == NONE, NONE, other - rank[ends.part])
    return replace(
        ends,
        source=np.where(ends.source == NONE, other, ends.source),
        destination=np.where(ends.destination == NONE, other, ends.destination),
    )
