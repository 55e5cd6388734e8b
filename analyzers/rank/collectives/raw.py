"""Communication events as one rank's trace has them, and how they become ``Collectives``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import field
from typing import Final, TypeVar

import numpy as np

from perfscope.analyzers.rank.collectives.collectives import UNKNOWN_GROUP, WORLD, Collectives, Group, Messages
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.steps import Steps
from perfscope.frozen import dataclass
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Bool, Int32, Int64, Trace

_PURPOSELESS: Final = "undefined"
"""torch's description of a group that was created without one."""

_T = TypeVar("_T", bound=Hashable)


@dataclass(frozen=True)
class CollectiveKey:
    """What distinguishes collectives beyond their times and sizes; many share one key."""

    group: Group
    kind: str
    dtype: str | None


@dataclass(frozen=True, eq=False)
class RawCollectives:
    """Communication events of one rank in any order: parallel arrays.

    ``key`` indexes ``keys``; ``issued_ns`` is the host time at which the event was issued (NONE: not recorded).
    ``messages.collective`` indexes these events. ``in_parameters`` and ``in_norms`` are as in ``autograd``. The other
    columns are those of ``Collectives``.
    """

    start_ns: Int64
    end_ns: Int64
    stream: Int64
    issued_ns: Int64
    key: Int64
    bytes: Int64
    mean_bytes: Int64
    sequence: Int64
    keys: Sequence[CollectiveKey]
    backward: Bool
    after_backward: Bool
    in_parameters: Bool
    in_norms: Bool
    messages: Messages = field(default_factory=Messages.none)
    on_host: bool = False

    def _of_layers(self) -> Bool:
        """As in ``Collectives``: where hooks of parameters reduce their gradients, what other functions reduce in the
        same group are none.
        """
        ways = [(each.group, each.kind) for each in self.keys]
        reduced = {ways[key] for key in distinct(self.key[self.in_parameters]).tolist()}
        beside = np.array([way in reduced for way in ways] or [False], dtype=np.bool_)[self.key]
        return np.asarray(self.in_norms | (beside & self.backward & ~self.in_parameters), dtype=np.bool_)

    def collectives(
        self, steps: Steps, between: Intervals, stretches: Sequence[Intervals], again: Intervals
    ) -> Collectives:
        """The same events in order of start, with a table for each label. ``between``: as in ``HostActivity``;
        ``stretches``: when an issue counts for each of ``STRETCHES``; ``again``: when the host runs a forward again.
        """
        order = np.lexsort((self.end_ns, self.start_ns))
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        key, start, issued = self.key[order], self.start_ns[order], self.issued_ns[order]
        # Labels are numbered as they appear, which is the same on all ranks.
        present, first = np.unique(key, return_index=True)
        present = present[np.argsort(first)]
        keys = [self.keys[index] for index in present.tolist()]
        key = np.argsort(present)[np.searchsorted(np.sort(present), key)]
        groups, group = _numbered([each.group for each in keys])
        kinds, kind = _numbered([each.kind for each in keys])
        dtypes, dtype = _numbered([each.dtype for each in keys])
        return Collectives(
            start_ns=start,
            end_ns=self.end_ns[order],
            group=group[key].astype(np.int32),
            kind=kind[key].astype(np.int32),
            dtype=dtype[key].astype(np.int32),
            bytes=self.bytes[order],
            mean_bytes=self.mean_bytes[order],
            sequence=self.sequence[order],
            # By the host time of issue; where that is not recorded, by the device's window around the start.
            step=np.where(issued == NONE, steps.of_device_time(start), steps.of_host_time(issued)),
            stream=self.stream[order],
            backward=self.backward[order],
            after_backward=self.after_backward[order],
            of_layers=self._of_layers()[order],
            of_norms=self.in_norms[order],
            between=between.covers(issued) & (issued != NONE),
            stretch=_which(stretches, issued),
            again=again.covers(issued) & (issued != NONE),
            groups=groups,
            kinds=kinds,
            dtypes=dtypes,
            messages=Messages(
                place[self.messages.collective], self.messages.peer, self.messages.sends, self.messages.bytes
            ),
            on_host=self.on_host,
        )


def _which(stretches: Sequence[Intervals], issued_ns: Int64) -> Int64:
    """The place of the one that covers each time; NONE where none does."""
    found = np.full(len(issued_ns), NONE, dtype=np.int64)
    for place, stretch in enumerate(stretches):
        found[stretch.covers(issued_ns) & (issued_ns != NONE)] = place
    return found


def listed_groups(trace: Trace) -> dict[str, Group]:
    """The groups that the recording lists with their ranks, by name; without groups of one rank."""
    return {
        group.name: group_of(group.name, group.ranks, len(group.ranks), group.description)
        for group in trace.groups
        if len(group.ranks) > 1
    }


def group_of(name: str, ranks: tuple[int, ...], size: int | None, description: str = "") -> Group:
    """A group with its ranks in ascending order, as torch numbers them within it."""
    return Group(
        name=name,
        ranks=tuple(sorted(ranks)),
        size=size,
        description="" if description == _PURPOSELESS else description,
    )


def assumed_group(trace: Trace) -> Group:
    """The group of a collective that names none: the only one that the recording lists, else ``UNKNOWN_GROUP``.

    Where the recording lists no groups, but the world size, it is the group of all ranks.
    """
    listed = list(listed_groups(trace).values())
    if len({group.ranks for group in listed}) == 1:
        return listed[0]
    if not listed and trace.world_size is not None and trace.world_size > 1:
        return Group(name=WORLD, ranks=tuple(range(trace.world_size)), size=trace.world_size)
    return UNKNOWN_GROUP


def looked_up(trace: Trace, ids: Int32, meaning: Callable[[str], _T]) -> list[_T]:
    """``meaning`` of each string (by its index; NONE is empty); called once per distinct string."""
    known = {index: meaning("" if index == NONE else trace.strings[index]) for index in distinct(ids).tolist()}
    return [known[index] for index in ids.tolist()]


def _numbered(values: Sequence[_T | None]) -> tuple[tuple[_T, ...], Int64]:
    """(each value once, the index of each value in these); NONE for None."""
    distinct = tuple(dict.fromkeys(value for value in values if value is not None))
    place = {value: index for index, value in enumerate(distinct)}
    return distinct, np.array([NONE if value is None else place[value] for value in values], dtype=np.int64)
