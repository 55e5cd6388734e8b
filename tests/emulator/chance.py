"""Random numbers by name: the same rank, step and piece of work draws the same number whatever else is changed."""

from __future__ import annotations

import zlib
from functools import lru_cache
from statistics import NormalDist

_BITS = 12
_NORMAL = [NormalDist().inv_cdf((i + 0.5) / (1 << _BITS)) for i in range(1 << _BITS)]
_MIX = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


@lru_cache(maxsize=100_000)
def _number(label: str) -> int:
    return zlib.crc32(label.encode())


def normal(seed: int, *where: int | str) -> float:
    """A standard normal number that belongs to ``where``."""
    word = seed
    for part in where:
        word = ((word ^ (part if isinstance(part, int) else _number(part))) * _MIX) & _WORD
        word ^= word >> 29
    return _NORMAL[(word * _MIX & _WORD) >> (64 - _BITS)]


def uniform(seed: int, *where: int | str) -> float:
    """A number in 0..1 that belongs to ``where``."""
    return NormalDist().cdf(normal(seed, *where))
