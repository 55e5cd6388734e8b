"""Clocks that nothing but messages without named peers ties together, set by the rhythm of these messages.

The two kernels of a message end together. On clocks that are an unknown time apart, the differences between a rank's
sends and its neighbour's recvs are all sorts of times; those of the messages that passed between the two are all that
one. So the offset is the difference that comes most often, if none comes nearly as often: in a pipeline whose work
never varies by a microsecond, the messages of the next micro-batch are as far apart every time, but for one.

Example: rank 0 sends at 10, 30, 60; rank 1, whose clock is 1000 ahead, receives at 1010, 1030, 1060. Of the nine
differences 1000 comes three times, each other one once.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.frozen import dataclass
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import Bool, Int64

_APART_NS: Final = 50_000
"""Ends of one message lie less than this apart."""

_FEWEST: Final = 4
"""So many messages at least show a rhythm."""

_OF_ALL: Final = 0.4
"""Part of a rank's kernels that must have a partner at the offset: one in the middle sends half of them elsewhere."""

_CLEARLY: Final = 1.03
"""By how many times as many messages an offset must fit as any other one."""

_STEPS: Final = 4
"""Steps of each group that are looked at."""

_GROUPS: Final = 4
"""Groups that are looked at for two clocks."""


@dataclass(frozen=True, eq=False)
class OpenEnds:
    """Kernels of messages whose peers are not named: parallel arrays.

    ``place`` is the place of a kernel's rank in its group; ``way`` 1 for a send, -1 for a recv, 0 where not known or
    both; ``bytes`` NONE where not known (below 0). Ends are on the ranks' own clocks.
    """

    rank: Int64
    group: Int64
    place: Int64
    step: Int64
    way: Int64
    bytes: Int64
    end_ns: Int64

    def __len__(self) -> int:
        return len(self.rank)


def offset_between(ends: OpenEnds, here: Bool, there: Bool, time_ns: Int64) -> int | None:
    """What to add to the times of the kernels ``there`` to set them against those ``here``, ns; None where their rhythm
    does not show it. ``time_ns`` are the kernels' ends, each on one clock of its side.

    Only ranks that are neighbours in their group are compared: those further apart pass messages on in the same rhythm,
    a little later.
    """
    shared = np.intersect1d(distinct(ends.group[here]), distinct(ends.group[there]))[:_GROUPS]
    apart, least = [np.empty(0, dtype=np.int64)], 0
    for group in shared.tolist():
        inside = ends.group == group
        for step in distinct(ends.step[inside & here])[:_STEPS].tolist():
            chosen = inside & (ends.step == step)
            for one, other in _neighbours(ends, np.flatnonzero(chosen & here), np.flatnonzero(chosen & there)):
                apart.append(_differences(ends, one, other, time_ns))
                least += min(len(one), len(other))
    return _most_common(np.sort(np.concatenate(apart)), max(_FEWEST, _OF_ALL * least))


def _neighbours(ends: OpenEnds, here: Int64, there: Int64) -> list[tuple[Int64, Int64]]:
    """The kernels of each two ranks that are next to each other in their group, one on each side."""
    mine, theirs = ends.place[here], ends.place[there]
    return [
        (here[mine == place], there[theirs == place + way])
        for place in distinct(mine).tolist()
        for way in (-1, 1)
        if (theirs == place + way).any()
    ]


def _differences(ends: OpenEnds, one: Int64, other: Int64, time_ns: Int64) -> Int64:
    """From each end of ``other`` to each of ``one`` that may be of the same message, ns."""
    left, right = one[:, None], other[None, :]
    sizes = ends.bytes[left], ends.bytes[right]
    fits = (ends.way[left] * ends.way[right] <= 0) & (
        (sizes[0] == sizes[1]) | (sizes[0] < 0) | (sizes[1] < 0)
    )  # fmt: skip
    return np.asarray((time_ns[left] - time_ns[right])[fits], dtype=np.int64)


def _most_common(apart_ns: Int64, least: float) -> int | None:
    """The middle of the most frequent of ascending differences; None below ``least``, or where others are as good."""
    until = np.searchsorted(apart_ns, apart_ns + _APART_NS, side="right")
    count = until - np.arange(len(apart_ns))
    if count.max(initial=0) < least:
        return None
    best = int(count.argmax())
    offset = int(np.median(apart_ns[best : until[best]]))
    elsewhere = np.abs(apart_ns - offset) > 2 * _APART_NS
    if count[best] < _CLEARLY * count[elsewhere].max(initial=0):
        return None
    return offset
