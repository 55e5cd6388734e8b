"""Exact nanoseconds from the microseconds of a Chrome trace.

``ts`` and ``dur`` are decimal microseconds, from kineto with three decimals. As float64, such a number determines its
nanosecond below 2^43 µs (101 days); larger ones are read from their text. A number with more decimals is recognized
below 2^42 µs and read from its text; between the two limits it may not be, and the time may differ by 1 ns from the
rounded text.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
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
