"""What the search for stragglers finds, and words for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Bool, Int64

CAUSES: Final = {
    TimeCategory.COMPUTE: "compute",
    TimeCategory.COPY: "copy",
    TimeCategory.DATALOADER: "dataloader",
    TimeCategory.SYNC: "sync",
    TimeCategory.LAUNCH: "launch",
    TimeCategory.HOST: "host",
    TimeCategory.DEPENDENCY: "launch",
    TimeCategory.UNKNOWN: "host",
}
"""Category of a rank's own time -> cause as the summary names it."""

LOADING: Final = CAUSES[TimeCategory.DATALOADER]

OWN: Final = np.array([int(category) for category in CAUSES])
"""The categories of a rank's own time."""

TOGETHER: Final = 1.5
"""A host is the straggler, not its ranks, where it costs this many times as much as the worst of them alone."""

ALIKE: Final = 0.75
"""Share of a host's ranks that must be slow for the host to be slow."""


@dataclass(frozen=True, eq=False)
class Straggler:
    """What some ranks cost the job: ``lost_ns`` per step, ``per_step_ns`` in each used step, and the main cause.

    ``lost_ns`` is the mean of ``per_step_ns``. Single steps may be negative: where one is shorter, another may wait
    longer. ``scope`` and ``ranks`` are as in ``StragglerRow``; ``rank`` is the one with the most time over its peers.
    ``causes``, ``alone_ns`` and ``adds_ns`` are those of each of ``ranks`` where they hide each other, else empty.
    """

    rank: int
    ranks: tuple[int, ...]
    scope: str
    cause: str
    lost_ns: float
    per_step_ns: Int64
    causes: tuple[str, ...] = ()
    alone_ns: tuple[float, ...] = ()
    adds_ns: tuple[float, ...] = ()
    replayed: bool = True
    """Else the recording does not show who waits for these ranks, and the cost is what they take longer."""
    within_steps: bool = False
    """Another of them is the slowest between each two collectives."""


def is_a_host(ranks: tuple[int, ...], hosts: Mapping[int, str]) -> bool:
    """Are these all ranks of one host, and are there other hosts?"""
    names = {hosts.get(rank, "") for rank in ranks}
    whole = tuple(sorted(rank for rank, name in hosts.items() if name in names))
    return len(names) == 1 and "" not in names and len(ranks) > 1 and whole == ranks and len(set(hosts.values())) > 1


def at_once(hits: Bool) -> float:
    """Of the steps (columns) in which any rank (line) is slow, the mean share of the ranks that are."""
    return float(hits[:, hits.any(axis=0)].mean())
