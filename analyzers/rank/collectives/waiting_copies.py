"""Copies into the buffer of a collective that wait for another collective, on a stream of their own.

FSDP2 copies the gradients of a unit together before it reduces them. With hybrid sharding, that copy waits until the
unit before is reduced across the replicas, and compute goes on meanwhile::

    compute     unit 2 | unit 1           | unit 0
    copies             . . . . . . . | copy of unit 2 |
    NCCL                                              | reduce-scatter of unit 2 |
    replicas    all-reduce of unit 3 |

Such a copy is not the rank's own progress: the reduce-scatter could have begun when unit 2 was computed and copied.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.analyzers.rank.collectives.communication import in_order_of_collectives
from perfscope.analyzers.rank.launches import DeviceWork
from perfscope.frozen import dataclass
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NEVER, NONE, Bool, Int64, Trace

_PROMPT_NS: Final = 20_000
"""What waits for an event of another stream starts within this time of it."""

_COLLECTIVE: Final = NEVER
"""Stands for the stream of a collective, whichever it is."""

_MOST: Final = 0.5
"""Share of what is launched on a stream of copies, piece by piece, that a collective follows."""


@dataclass(frozen=True, eq=False)
class WaitingCopies:
    """``is_copy`` [piece of device work] marks the copies. For each collective, in order: when the first copy in front
    of it was launched (NONE: none that waited), and what they take together, ns.
    """

    is_copy: Bool
    launched_ns: Int64
    took_ns: Int64


def waiting_copies(trace: Trace, work: DeviceWork, is_communication: Bool) -> WaitingCopies:
    """The copies of one rank that waited for a collective; none where launches are not recorded."""
    collectives = in_order_of_collectives(work, is_communication)
    found = WaitingCopies(
        np.zeros(len(work), dtype=np.bool_),
        np.full(len(collectives), NONE, dtype=np.int64),
        np.zeros(len(collectives), dtype=np.int64),
    )
    launched = np.flatnonzero(work.launch != NONE)
    own = launched[~is_communication[launched]]
    if len(own) == len(launched) or len(distinct(trace.stream[work.row[own]])) < 2:
        return found
    called = work.launch_start_ns(trace)
    launched = launched[np.lexsort((work.start_ns[launched], called[launched]))]
    stream = np.where(is_communication[launched], _COLLECTIVE, trace.stream[work.row[launched]])
    # Pieces of the program: work that is launched on one stream in a row, or one collective.
    first = np.flatnonzero(np.concatenate(([True], (stream[1:] != stream[:-1]) | (stream[1:] == _COLLECTIVE))))
    last = np.append(first[1:], len(launched)) - 1
    is_copying = np.isin(stream[first], _streams_of_copies(work, launched, stream, first))
    own_end = np.maximum.accumulate(np.where(stream == _COLLECTIVE, NEVER, work.end_ns[launched]))
    able = np.append(NEVER, own_end)[first]  # when all that was launched before had ended
    ended = np.append(NEVER, np.sort(work.end_ns[collectives]))
    begun, done = work.start_ns[launched[first]], work.end_ns[launched[last]]
    awaited = ended[np.searchsorted(ended, begun, side="right") - 1]
    waited = is_copying & (begun - able > _PROMPT_NS) & (awaited > able) & (begun - awaited <= _PROMPT_NS)
    waited &= np.append(stream[first[1:]] == _COLLECTIVE, False)  # a collective follows
    waited &= called[launched[last]] < awaited  # all were queued, so that no host waits for one of them
    row = np.full(len(work), NONE, dtype=np.int64)
    row[collectives] = np.arange(len(collectives))
    for piece in np.flatnonzero(waited).tolist():
        following = row[launched[first[piece + 1]]]
        copies = launched[first[piece] : last[piece] + 1]
        if done[piece] <= work.start_ns[collectives[following]] + _PROMPT_NS:
            found.is_copy[copies] = True
            found.launched_ns[following] = called[copies[0]]
            found.took_ns[following] = done[piece] - begun[piece]
    return found


def _streams_of_copies(work: DeviceWork, launched: Int64, stream: Int64, first: Int64) -> Int64:
    """The streams but for the busiest one where collectives follow most of what is launched."""
    own = distinct(stream[stream != _COLLECTIVE])
    length = work.end_ns[launched] - work.start_ns[launched]
    busy = [int(length[stream == each].sum()) for each in own.tolist()]
    follows = np.append(stream[first[1:]] == _COLLECTIVE, False)
    copying = [follows[stream[first] == each].mean() > _MOST for each in own.tolist()]
    chosen = np.array(copying, dtype=np.bool_) & (np.array(busy) < max(busy, default=0))
    return np.asarray(own[chosen], dtype=np.int64)
