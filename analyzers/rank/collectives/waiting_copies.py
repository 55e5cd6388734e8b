"""Copies that wait for a collective on a stream of their own: into the buffer of another one, or of its result.

FSDP2 copies the gradients of a unit together before it reduces them. With hybrid sharding, that copy waits until the
unit before is reduced across the replicas, and compute goes on meanwhile::

    compute     unit 2 | unit 1           | unit 0
    copies             . . . . . . . | copy of unit 2 |
    NCCL                                              | reduce-scatter of unit 2 |
    replicas    all-reduce of unit 3 |

Such a copy is not the rank's own progress: the reduce-scatter could have begun when unit 2 was computed and copied.
Nor is one that casts or divides what a reduction left, as in ZeRO and FSDP on the stream of their reductions: compute
that follows it may wait for a gather behind that reduction.
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
"""Share of what is launched on a stream of copies, piece by piece, that a collective is in front of or follows."""


@dataclass(frozen=True, eq=False)
class WaitingCopies:
    """``is_copy`` [piece of device work] marks the copies, those of results too. For each collective, in order: when
    the first copy in front of it was launched (NONE: none that waited), and what they take together, ns, with a copy of
    a result that they waited for.
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
    pieces = _LaunchedPieces.of(trace, work, is_communication, launched)
    results = pieces.results(work)
    waited, since_ns = pieces.waited(work, collectives, results)
    row = np.full(len(work), NONE, dtype=np.int64)
    row[collectives] = np.arange(len(collectives))
    found.is_copy[pieces.work_of(results)] = True
    for piece in np.flatnonzero(waited).tolist():
        following = row[pieces.launched[pieces.first[piece + 1]]]
        copies = pieces.launched[pieces.first[piece] : pieces.last[piece] + 1]
        if pieces.done[piece] <= work.start_ns[collectives[following]] + _PROMPT_NS:
            found.is_copy[copies] = True
            found.launched_ns[following] = pieces.called[copies[0]]
            found.took_ns[following] = pieces.done[piece] - since_ns[piece]
    return found


@dataclass(frozen=True, eq=False)
class _LaunchedPieces:
    """Pieces of the program: work that is launched on one stream in a row, or one collective. ``launched`` is the
    device work as it was launched, ``first`` and ``last`` are the places in it of each piece, ``begun`` and ``done``
    its times, ``called`` the launch of each piece of device work.
    """

    launched: Int64
    first: Int64
    last: Int64
    is_collective: Bool
    beside: Bool
    """On a stream but for the busiest one, where collectives are in front of or behind most of what is launched."""
    begun: Int64
    done: Int64
    called: Int64

    @classmethod
    def of(cls, trace: Trace, work: DeviceWork, is_communication: Bool, launched: Int64) -> _LaunchedPieces:
        """Those of the work with recorded launches."""
        called = work.launch_start_ns(trace)
        launched = launched[np.lexsort((work.start_ns[launched], called[launched]))]
        stream = np.where(is_communication[launched], _COLLECTIVE, trace.stream[work.row[launched]])
        first = np.flatnonzero(np.concatenate(([True], (stream[1:] != stream[:-1]) | (stream[1:] == _COLLECTIVE))))
        last = np.append(first[1:], len(launched)) - 1
        beside = np.isin(stream[first], _streams_of_copies(work, launched, stream, first))
        return cls(
            launched, first, last, stream[first] == _COLLECTIVE, beside, work.start_ns[launched[first]],
            work.end_ns[launched[last]], called,
        )  # fmt: skip

    def results(self, work: DeviceWork) -> Bool:
        """Which copy the result of the collective in front of them, and began when that had ended."""
        behind = self.beside & np.append(False, self.is_collective[:-1])
        ended = np.append(NEVER, self.done[:-1])
        able = self._able(work, np.zeros(len(self.first), dtype=np.bool_))
        return np.asarray(behind & self._began_with(ended, able), dtype=np.bool_)

    def waited(self, work: DeviceWork, collectives: Int64, results: Bool) -> tuple[Bool, Int64]:
        """(which are in front of a collective, and began only when another, or a copy of its result, had ended; since
        when they and such a copy in front of them take time).
        """
        ends = np.concatenate((work.end_ns[collectives], self.done[results]))
        # A copy of a result takes time from the end of its collective on.
        since = np.concatenate((np.full(len(collectives), NONE), self.done[np.flatnonzero(results) - 1]))
        order = np.argsort(ends, kind="stable")
        last = np.searchsorted(ends[order], self.begun, side="right")
        ended, copied = np.append(NEVER, ends[order])[last], np.append(NONE, since[order])[last]
        follows = np.append(self.is_collective[1:], False)
        began = self._began_with(ended, self._able(work, results))
        waited = np.asarray(self.beside & follows & began, dtype=np.bool_)
        return waited, np.where(copied == NONE, self.begun, copied)

    def work_of(self, chosen: Bool) -> Int64:
        """The device work of these pieces."""
        return np.asarray(self.launched[np.repeat(chosen, self.last - self.first + 1)], dtype=np.int64)

    def _able(self, work: DeviceWork, without: Bool) -> Int64:
        """When all own work that was launched before each piece had ended, but for these pieces'."""
        left_out = np.repeat(self.is_collective | without, self.last - self.first + 1)
        own_end = np.maximum.accumulate(np.where(left_out, NEVER, work.end_ns[self.launched]))
        return np.asarray(np.append(NEVER, own_end)[self.first], dtype=np.int64)

    def _began_with(self, awaited: Int64, able: Int64) -> Bool:
        """Did each begin only as this had ended, all of it queued, so that no host waits for it?"""
        prompt = (awaited > able) & (self.begun >= awaited) & (self.begun - awaited <= _PROMPT_NS)
        queued = self.called[self.launched[self.last]] < awaited
        return np.asarray(prompt & (self.begun - able > _PROMPT_NS) & queued, dtype=np.bool_)


def _streams_of_copies(work: DeviceWork, launched: Int64, stream: Int64, first: Int64) -> Int64:
    """The streams but for the busiest one where collectives are in front of or behind most of what is launched."""
    own = distinct(stream[stream != _COLLECTIVE])
    length = work.end_ns[launched] - work.start_ns[launched]
    busy = [int(length[stream == each].sum()) for each in own.tolist()]
    is_collective = stream[first] == _COLLECTIVE
    beside = np.append(is_collective[1:], False) | np.append(False, is_collective[:-1])
    copying = [beside[stream[first] == each].mean() > _MOST for each in own.tolist()]
    chosen = np.array(copying, dtype=np.bool_) & (np.array(busy) < max(busy, default=0))
    return np.asarray(own[chosen], dtype=np.int64)
