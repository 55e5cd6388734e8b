"""Values of documents that anybody may have written: what is not of the type that is expected counts as absent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from perfscope.trace.trace import Int64
from perfscope.typed import clean

INT64: Final = 2**63 - 1
"""The largest number that a column holds."""


def mapping(value: Any) -> Mapping[str, Any]:
    """``value`` where it is a dictionary, else an empty one."""
    return value if isinstance(value, dict) else {}


def mappings(value: Any) -> list[Any]:
    """The dictionaries in a list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def text(value: Any) -> str:
    """At most 1,000 characters of a text, without control characters."""
    if not isinstance(value, str):
        return ""
    return value[:1000] if value.isprintable() else clean(value[:1000])


def texts(value: Any) -> tuple[str, ...]:
    """At most 1,000 texts of a list."""
    return tuple(text(each) for each in value[:1000]) if isinstance(value, list) else ()


def whole(value: Any, otherwise: int = 0) -> int:
    """A whole number of 64 bits, which JSON may give as text."""
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
        return int(value)
    return value if type(value) is int and abs(value) <= INT64 else otherwise


def column(values: Iterable[int]) -> Int64:
    """Whole numbers as a column."""
    return np.fromiter(values, dtype=np.int64)
