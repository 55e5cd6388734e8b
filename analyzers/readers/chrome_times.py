"""Exact nanoseconds from the microseconds of a Chrome trace.

``ts`` and ``dur`` are decimal microseconds, from kineto with three decimals. As float64, such a number determines its
nanosecond below 2^43 µs (101 days); larger ones are read from their text. A number with more decimals is recognized
below 2^42 µs and read from its text; between the two limits it may not be, and the time may differ by 1 ns from the
rounded text. ``SplitRanges`` joins begins with ends.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Hashable, Sequence
from decimal import ROUND_HALF_EVEN, Decimal, DecimalException
from typing import Any

import numpy as np

from perfscope.trace.trace import Int64

_FLOAT_LIMIT_US = float(1 << 43)
_INT_LIMIT_US = float(1 << 53)
_INT64_MAX = (1 << 63) - 1
_INT64_DIGITS = 19
_NS_PER_US = 1000


def from_numbers(values: Sequence[Any]) -> Int64 | None:
    """Nanoseconds of decoded microseconds; None where a value is no number or its text may be more exact."""
    try:
        us = np.frombuffer(struct.pack(f"{len(values)}d", *values), dtype=np.float64)
    except (struct.error, OverflowError, TypeError):
        return None
    if not len(us):
        return us.astype(np.int64)
    largest = np.abs(us).max()
    if not largest < _FLOAT_LIMIT_US and (largest >= _INT_LIMIT_US or float in set(map(type, values))):
        return None
    whole = np.floor(us)
    fraction = np.rint((us - whole) * _NS_PER_US)
    ns = (whole * _NS_PER_US).astype(np.int64) if largest < _FLOAT_LIMIT_US else whole.astype(np.int64) * _NS_PER_US
    ns += fraction.astype(np.int64)
    # Equal only if the number is the float64 nearest to a whole count of ns: more than three decimals would be lost.
    if (us != whole).any() and (ns / _NS_PER_US != us).any():
        return None
    return ns


def from_texts(texts: Sequence[bytes]) -> list[int | None]:
    """Nanoseconds of JSON numbers or quoted numbers, rounded half to even; None for others and those beyond int64."""
    texts = [text.strip() for text in texts]  # else a space could pass for a third decimal
    if all(text[-4:-3] == b"." for text in texts):
        joined = b" ".join(texts)
        try:
            ns: list[int | None] = list(map(int, joined.replace(b".", b"").split()))
        except ValueError:
            ns = []
        if len(ns) == len(texts) == joined.count(b".") and all(abs(number or 0) <= _INT64_MAX for number in ns):
            return ns
    return [from_text(text) for text in texts]


def from_text(text: bytes) -> int | None:
    """Nanoseconds of one JSON number or quoted number, rounded half to even; None for others and beyond int64."""
    digits = text.strip().strip(b'"').strip()
    whole, point, fraction = digits.partition(b".")
    if whole.isdigit() and len(whole) <= _INT64_DIGITS and len(fraction) <= 3 and (fraction.isdigit() or not point):
        ns = int(whole) * _NS_PER_US + int(fraction.ljust(3, b"0"))
        return ns if ns <= _INT64_MAX else None
    try:
        exact = Decimal(digits.decode("ascii")) * _NS_PER_US
    except (DecimalException, UnicodeDecodeError):
        return None
    if not exact.is_finite() or exact.adjusted() > _INT64_DIGITS:
        return None
    ns = int(exact.to_integral_value(ROUND_HALF_EVEN))
    return ns if abs(ns) <= _INT64_MAX else None


class SplitRanges:
    """Ranges written as two events, a begin and an end, put together again. Events may come in any order.

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
