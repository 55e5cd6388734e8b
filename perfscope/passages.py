"""Messages between ranks whose clocks no collective ties together: what they say of these clocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfscope.medians import Lines, fit_lines
from perfscope.trace import Bool, Int64

_ALMOST_ALL = 90
"""Percentile that stands for an extreme of many differences, so that one wrong timestamp does not."""


@dataclass(frozen=True, eq=False)
class Passages:
    """Messages from rank to rank, each on its two ranks' own clocks: parallel arrays.

    A message cannot be there before it was sent. ``ends_tell`` where, besides, its receipt ends as soon as it is sent:
    a device's kernels do, unless the message fits into a buffer; a host's range ends when somebody asks for it.
    """

    sender: Int64
    receiver: Int64
    send_start_ns: Int64
    send_end_ns: Int64
    receipt_end_ns: Int64
    ends_tell: Bool


class Joints:
    """Messages between parts, and what brings each part's times to part 0's. Times are those of the parts' own clocks.

    Messages to a part say that its clock cannot be set further back, messages from it that it cannot be set further
    forward. Where a receipt ends as soon as its message is sent the two limits meet; the estimate lies between them.
    """

    def __init__(
        self, sender: Int64, receiver: Int64, sent_ns: Int64, received_ns: Int64, ends_tell: Bool, reference: Int64
    ) -> None:
        self._sides = (sender, sent_ns), (receiver, received_ns)
        self._ends_tell = ends_tell
        self._reference = reference
        self.lines = Lines.flat(len(reference))
        self.slack = np.zeros(len(reference), dtype=np.int64)
        """What the limits leave open."""
        self.reached = np.zeros(len(reference), dtype=np.bool_)

    def settle(self) -> None:
        """Walk outwards from part 0."""
        self.reached[:1] = True
        (sender, _), (receiver, _) = self._sides
        while True:
            out = self.reached[sender] & ~self.reached[receiver]
            back = self.reached[receiver] & ~self.reached[sender]
            found = np.unique(np.concatenate((receiver[out], sender[back])))
            if len(found) == 0:
                return
            for part in found.tolist():
                self._set(part, out & (receiver == part), back & (sender == part))
            self.reached[found] = True

    def _set(self, part: int, to: Bool, fro: Bool) -> None:
        """Estimate one part by the messages to it and from it."""
        there, here = self._moved(0, to), self._moved(1, fro)
        own = self._sides[1][1][to], self._sides[0][1][fro]
        since = tuple(times - self._reference[part] for times in own)
        apart = there - own[0], here - own[1]
        if self._ends_tell[to | fro].all():
            alike = np.zeros(int(to.sum() + fro.sum()), dtype=np.int64)
            line = fit_lines(alike, np.concatenate(since), np.concatenate(apart), 1)
            self.lines.slope[part] = line.slope[0]
        level = [
            values - np.rint(self.lines.slope[part] * times).astype(np.int64)
            for values, times in zip(apart, since, strict=True)
        ]
        limits = [
            float(np.percentile(values, share))
            for values, share in zip(level, (_ALMOST_ALL, 100 - _ALMOST_ALL), strict=True)
            if len(values)
        ]
        estimate = sum(limits) / len(limits)
        off = (
            np.abs(np.array(limits) - estimate)
            if len(limits) == 2
            else np.abs(np.concatenate(level).astype(np.float64) - estimate)
        )
        self.lines.offset[part], self.slack[part] = round(estimate), round(float(np.median(off)))

    def _moved(self, side: int, which: Bool) -> Int64:
        """Times of one side of these messages, brought to part 0's."""
        part, times = (column[which] for column in self._sides[side])
        return times + self.lines.at(part, times - self._reference[part])
