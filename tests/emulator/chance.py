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
    return normal_in(place(seed, *where[:-1]), where[-1])


def place(seed: int, *where: int | str) -> int:
    """What the numbers of all that is in ``where`` have in common: a step's many kernels find it once."""
    word = seed
    for part in where:
        word = _within(word, part)
    return word


def normal_in(place: int, part: int | str) -> float:
    """``normal`` of a part of a ``place``."""
    return _NORMAL[(_within(place, part) * _MIX & _WORD) >> (64 - _BITS)]


def _within(word: int, part: int | str) -> int:
    word = ((word ^ (part if isinstance(part, int) else _number(part))) * _MIX) & _WORD
    return word ^ (word >> 29)


def uniform(seed: int, *where: int | str) -> float:
    """A number in 0..1 that belongs to ``where``."""
    return NormalDist().cdf(normal(seed, *where))
