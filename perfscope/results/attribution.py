"""Whom the job waits for: the one answer that captions, and every choice of a few ranks to show, read.

It follows from the stragglers, whose cost is replayed. Who waits longest, arrives last most often or has most of the
critical path shows what happened, but names nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from perfscope.results.rows import StragglerRow
from perfscope.text import duration, ranks_in_words

_WORTH_NAMING: Final = 0.5
"""Stragglers that cost less than this part of the worst are not named beside it."""

_MOST_NAMED: Final = 3

CAUSE_PHRASES: Final = {
    "compute": "slower compute",
    "dataloader": "slower data loading",
    "launch": "slower kernel launches",
    "host": "Python work outside operators",
    "sync": "host synchronization",
    "copy": "slower copies",
    "communication": "slower communication",
}
"""A straggler's ``cause`` in words: ``host`` alone could be a machine."""


def named(stragglers: Sequence[StragglerRow]) -> tuple[StragglerRow, ...]:
    """The stragglers that a sentence names, the costliest first."""
    return tuple(row for row in stragglers[:_MOST_NAMED] if row.lost_us >= _WORTH_NAMING * stragglers[0].lost_us)


def attributed_ranks(stragglers: Sequence[StragglerRow]) -> tuple[int, ...]:
    """Ranks to show first: the slowest of each straggler, the costliest first, then all others that are one with it."""
    slowest = [row.rank for row in stragglers]
    return tuple(dict.fromkeys((*slowest, *(rank for row in stragglers for rank in row.ranks))))


_BY_RANKS: Final = "host of "
"""What the name of a host begins with that is not recorded, and called by its ranks."""


def host_in_words(name: str) -> str:
    """A host inside a sentence: ``host node-3``, ``host of ranks 0-7``."""
    return name if name.startswith(_BY_RANKS) else f"host {name}"


def _ranks_of_host(row: StragglerRow, ranks: str) -> str:
    if row.host.startswith(_BY_RANKS):
        return row.host
    return f"{host_in_words(row.host) if row.host else 'one host'} ({ranks})"


def who(row: StragglerRow) -> str:
    """The straggler inside a sentence: a rank, or which ranks of what."""
    ranks = ranks_in_words(row.ranks)
    return {
        "host": _ranks_of_host(row, ranks),
        "stage": f"one pipeline stage ({ranks})",
        "ranks": ranks,
        "link": f"the link between {ranks}",
        "job": f"{ranks} in turn",
    }.get(row.scope, f"rank {row.rank}")


def subject(row: StragglerRow) -> str:
    """The same at the beginning of a sentence."""
    words = who(row)
    return words[0].upper() + words[1:]


def causes(row: StragglerRow) -> str:
    """The cause; of each rank and with what it adds, where ranks hide each other by several."""
    if len(set(row.causes)) < 2:
        return _phrase(row.cause)
    parts = zip(row.ranks, row.causes, row.adds_us, strict=True)
    return "; ".join(f"rank {rank}: {_phrase(cause)} ({duration(adds)})" for rank, cause, adds in parts)


def _phrase(cause: str) -> str:
    return CAUSE_PHRASES.get(cause, cause)
