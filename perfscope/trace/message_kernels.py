"""Kernels that carry several messages end with the last of them: which of their messages that is, and what the ends of
a message's two kernels then say about their clocks.

Example: a kernel exchanges messages with a rank of its own host and with one of another host, and ends at 120, that of
the rank beside it at 90. The messages between these two were there by 90, so it is the other host's message that came
at 120, and that host's kernel ends at 120 or later.
"""

from __future__ import annotations

import numpy as np

from perfscope.frozen import dataclass
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import Bool, Int64

_TOGETHER_NS = 20_000
"""Kernels that end within this time of each other may have ended with one message."""


@dataclass(frozen=True, eq=False)
class MessageKernels:
    """Messages on devices, by the kernels at their two ends: parallel arrays.

    ``sender`` and ``receiver`` are numbers of kernels; ``clock``, ``start_ns`` and ``end_ns`` have a line for each.
    """

    sender: Int64
    receiver: Int64
    clock: Int64
    start_ns: Int64
    end_ns: Int64

    def last(self, frame: Int64, end_ns: Int64) -> Bool:
        """Which kernels end with their only message from another frame: those of the same frame that they exchange
        messages with ended sooner. ``frame`` has the number of each kernel's frame, in which ends, ``end_ns``, can be
        compared.
        """
        size = max(len(end_ns), 1)
        both = np.append(self.sender * size + self.receiver, self.receiver * size + self.sender)
        here, there = np.divmod(distinct(both), size)
        latest = np.full(len(end_ns), np.iinfo(np.int64).min // 2, dtype=np.int64)
        inside = frame[here] == frame[there]
        np.maximum.at(latest, here[inside], end_ns[there[inside]])
        outside = np.bincount(here[~inside], minlength=len(end_ns))
        return np.asarray((outside == 1) & (end_ns > latest + _TOGETHER_NS))

    def least_ns(self) -> Int64:
        """What each message took at least: of the kernels with messages between the same two clocks the shortest, that
        of a rank which the others waited for.
        """
        size = max(len(self.clock), 1)
        clocks = self.clock[self.sender], self.clock[self.receiver]
        _, pair = np.unique(np.minimum(*clocks) * size + np.maximum(*clocks), return_inverse=True)
        took = self.end_ns - self.start_ns
        least = np.full(int(pair.max(initial=-1)) + 1, np.iinfo(np.int64).max, dtype=np.int64)
        np.minimum.at(least, pair, np.minimum(took[self.sender], took[self.receiver]))
        return np.asarray(least[pair], dtype=np.int64)
