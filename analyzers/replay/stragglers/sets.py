"""Ranks that hide each other: each alone at its peers' pace saves little, because the others still delay the job.

Example: rank 1 computes for 30 longer than its peers, rank 5 launches for 28 longer. With rank 1 at its peers' pace the
job still waits for rank 5, so 2 are saved; with rank 5 nothing is; with both of them 30.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perfscope.frozen import dataclass

Unit = tuple[int, ...]
"""Ranks that are slow together: one, or those of a host."""

Cost = Callable[[Sequence[Unit]], float]
"""Ns per step that these units save together at their peers' pace."""


@dataclass(frozen=True)
class HiddenSet:
    """Units that cost ``lost_ns`` per step together. ``alone_ns`` is what each saves alone; ``adds_ns`` is half-way
    between that and what is lost where only it stays slow, scaled to add up to the cost.
    """

    units: tuple[Unit, ...]
    lost_ns: float
    alone_ns: tuple[float, ...]
    adds_ns: tuple[float, ...]


def hidden_set(units: Sequence[Unit], cost: Cost, noise_ns: float) -> HiddenSet | None:
    """Those of ``units``, the slowest first, that cost more together than one by one, by more than twice ``noise_ns``
    (the slowest of many are so by chance, too); None where no two do.
    """
    chosen = list(units)
    whole = cost(chosen) if len(chosen) > 1 else 0.0
    if whole < noise_ns:
        return None
    for unit in units[::-1]:
        rest = [other for other in chosen if other != unit]
        if rest and cost(rest) >= whole - noise_ns:
            chosen = rest
    # What a unit saves after all others and before them is the same where it hides behind nobody.
    last = {unit: cost(chosen) - cost([other for other in chosen if other != unit]) for unit in chosen}
    chosen = [unit for unit in chosen if last[unit] - cost([unit]) >= noise_ns / 2]
    if len(chosen) < 2:
        return None
    whole = cost(chosen)
    alone = [max(cost([unit]), 0.0) for unit in chosen]
    if whole - sum(alone) < 2 * noise_ns:
        return None
    parts = [
        max((mine + whole - cost([other for other in chosen if other != unit])) / 2, 0.0)
        for unit, mine in zip(chosen, alone, strict=True)
    ]
    scale = whole / sum(parts)
    return HiddenSet(tuple(chosen), whole, tuple(alone), tuple(part * scale for part in parts))
