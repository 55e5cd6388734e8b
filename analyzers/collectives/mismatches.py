"""Collectives that do not pair up, in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from perfscope.analyzers.collectives.groups import ranks_text


@dataclass(frozen=True)
class Mismatch:
    """Collectives that do not pair up: a group in which ranks issued different sequences in one step.

    ``ranks`` are those that differ from most of the group.
    """

    group: str
    step: int
    text: str
    ranks: tuple[int, ...] = ()


def by_value(values: Mapping[int, object]) -> tuple[str, tuple[int, ...]]:
    """(``ranks 0-6: 3, rank 7: 2``, the ranks that do not have the commonest value), for a value of each rank."""
    owners: dict[object, list[int]] = defaultdict(list)
    for rank in sorted(values):
        owners[values[rank]].append(rank)
    text = ", ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}: {value}"
        for value, ranks in sorted(owners.items(), key=lambda item: item[1])
    )
    most = max(owners.values(), key=len)
    return text, tuple(sorted(set(values) - set(most)))


def called(kind: str, size: int) -> str:
    """A collective in words; its size where known (not below 0)."""
    return f"{kind} of {size} bytes" if size >= 0 else kind
