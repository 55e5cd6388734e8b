"""Ranges written as two events, a begin and an end, put together again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable


class SplitRanges:
    """Begins and ends of ranges, each thread's nested within one another, in any order.

    Of two events at one time, the one that comes first in the file happens first. Example, one thread: begin row 0 at
    10, begin row 1 at 20, end at 30, end at 50: row 1 lasts 10 and row 0 lasts 40.
    """

    def __init__(self) -> None:
        self._events: dict[Hashable, list[tuple[int, int, int | None]]] = defaultdict(list)
        """Thread to (time, place in the file, row of a begin or None for an end)."""

    def begin(self, thread: Hashable, time_ns: int, place: int, row: int) -> None:
        """Row ``row`` of the trace begins."""
        self._events[thread].append((time_ns, place, row))

    def end(self, thread: Hashable, time_ns: int, place: int) -> None:
        """The innermost open range of the thread ends."""
        self._events[thread].append((time_ns, place, None))

    def join(self) -> tuple[dict[int, int], list[int], int]:
        """(duration of each row that ends, rows that never end, ends of nothing)."""
        durations: dict[int, int] = {}
        endless: list[int] = []
        unopened = 0
        for events in self._events.values():
            stack: list[tuple[int, int]] = []
            for time_ns, _, row in sorted(events, key=lambda event: event[:2]):
                if row is not None:
                    stack.append((row, time_ns))
                elif stack:
                    opened, start_ns = stack.pop()
                    durations[opened] = time_ns - start_ns
                else:
                    unopened += 1
            endless.extend(row for row, _ in stack)
        return durations, endless, unopened
