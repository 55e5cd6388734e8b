"""Mutated flight-recorder dumps: bytes flipped, cut, doubled, swapped; opcodes and extreme numbers put in."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

_TOKENS = (
    b"cos\nsystem\n", b"R", b"\x81", b"b", b"i", b"o", b"\x93", b"Q", b"\x82\x01", b"(", b".", b"e", b"u", b"t",
    b"r\xff\xff\xff\xff", b"j\xff\xff\xff\x7f", b"X\xff\xff\xff\x7f", b"\x8a\xff", b"\x8b\xff\xff\xff\x7f",
    b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f", b"J\xff\xff\xff\xff",
    b'"', b"[[[[", b"{", b"}", b"-1", b"9" * 40, b"null", b"1e999", b"\\ud800", b"0->", b"\xff",
)  # fmt: skip


_VALUES = (
    None, True, -1, 0, 7, 2**31, 2**63, -(2**70), 1.5, float("nan"), "", "7", "x" * 5000, "nccl:send 0->9999999999",
    "nccl:recv 1<-0", "gloo:", ":", "[0, 1, -5, 99999999999]", [], {}, [[]], [[[1]]], {"a": 1}, ["0", "default_pg"],
    ["a", "b", "c"], [None], "started", "completed",
)  # fmt: skip


def mutations(data: bytes, rng: random.Random, count: int) -> Iterator[bytes]:
    """``count`` variants of ``data``, each with one to four changes."""
    for _ in range(count):
        mutated = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 4))):
            _mutate(mutated, rng)
        yield bytes(mutated)


def strange(document: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A copy of a dump's document in which one to three values are of another type, absent, or out of all bounds."""
    changed = copy.deepcopy(document)
    for _ in range(rng.randint(1, 3)):
        holder: Any = changed
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            key = rng.choice(keys)
            inner = holder[key]
            if not isinstance(inner, (dict, list)) or not inner or rng.random() < 0.15:
                break
            holder = inner
        if isinstance(holder, dict) and rng.random() < 0.2:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(rng.choice(_VALUES))
        if not changed:
            return {"entries": []}
    return changed


def _mutate(data: bytearray, rng: random.Random) -> None:
    at, to = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    to = min(to, at + 200)
    change = rng.randrange(6)
    if change == 0 and at < len(data):
        data[at] = rng.randrange(256)
    elif change == 1:
        data[at:at] = rng.choice(_TOKENS)
    elif change == 2:
        del data[at:to]
    elif change == 3:
        data[at:at] = data[at:to]
    elif change == 4:
        data[at:to] = rng.choice(_TOKENS)
    else:
        del data[max(at, 1) :]
