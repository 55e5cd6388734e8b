"""What rules on communication look at: who moves how much, what of it is latency, and what a change was replayed to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.findings import Confidence, Prediction
from perfscope.summary import CollectiveRow

MIB: Final = 1 << 20
GIB: Final = 1 << 30
SMALLEST: Final = 4096
"""Collectives of fewer bytes are losses, norms and counters."""


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in the group that moves most of them, per step."""

    group: str
    ranks: tuple[int, ...]
    kind: str
    dtype: str | None
    """The type of most bytes."""
    count: float
    bytes: float
    largest: int
    transfer_us: float
    """Sum over the collectives, whether hidden or not."""
    alpha_us: float | None
    """Fitted cost of starting one; None where that could not be fitted."""
    across_hosts: bool | None

    @property
    def latency_share(self) -> float | None:
        """Share of the transfer time that starting the collectives takes."""
        if self.alpha_us is None or self.transfer_us <= 0:
            return None
        return min(self.count * self.alpha_us / self.transfer_us, 1.0)

    @property
    def us_per_byte(self) -> float:
        """Transfer time of a byte, starting costs left out."""
        return max(self.transfer_us - self.count * (self.alpha_us or 0.0), 0.0) / self.bytes


def traffic(facts: JobFacts, *kinds: str) -> Traffic | None:
    """The busiest group's collectives of these kinds, of the kind that moves most; None where there are none with their
    size, or steps are not marked.
    """
    rows = [row for row in facts.collectives if row.kind in kinds and (row.bytes or 0) >= SMALLEST]
    if not rows or facts.steps == 0:
        return None
    moved: dict[tuple[str, str], float] = {}
    for row in rows:
        moved[row.group, row.kind] = moved.get((row.group, row.kind), 0.0) + _moved(row)
    group, kind = max(moved, key=lambda key: moved[key])
    mine = [row for row in rows if (row.group, row.kind) == (group, kind)]
    by_dtype: dict[str | None, float] = {}
    for row in mine:
        by_dtype[row.dtype] = by_dtype.get(row.dtype, 0.0) + _moved(row)
    cost = next((row for row in facts.cost_model if (row.group, row.kind) == (group, kind)), None)
    return Traffic(
        group=group,
        ranks=tuple(sorted({rank for row in mine for rank in row.ranks})),
        kind=kind,
        dtype=max(by_dtype, key=lambda dtype: by_dtype[dtype]),
        count=sum(row.count for row in mine) / facts.steps,
        bytes=sum(_moved(row) for row in mine) / facts.steps,
        largest=max(row.bytes or 0 for row in mine),
        transfer_us=sum(row.transfer_us * row.count for row in mine) / facts.steps,
        alpha_us=None if cost is None else cost.alpha_us,
        across_hosts=next((row.across_hosts for row in facts.groups if row.name == group), None),
    )


def _moved(row: CollectiveRow) -> float:
    return float((row.bytes or 0) * row.count)


def on_devices(facts: JobFacts) -> bool:
    """Does the job train on accelerators? Ranks without device work are listed as ``CPU``."""
    return "CPU" not in facts.devices


def replayed(facts: JobFacts, change: Mapping[str, str], share: float) -> tuple[Prediction, float] | None:
    """The prediction for a change and the µs of a step that it saves; None where that cannot be replayed, or saves less
    than ``share`` of the step.
    """
    found = facts.predict(change) if facts.predict is not None else None
    if found is None:
        return None
    saved_us = facts.step_time_us - found.mid / 1e3
    return (found, saved_us) if saved_us >= share * facts.step_time_us else None


def room_bytes(facts: JobFacts) -> int | None:
    """Device memory that is free on the fullest rank at its fullest; None where that is not known of all ranks."""
    told = [row.headroom_bytes for row in facts.memory if row.kind == "device" and row.headroom_bytes is not None]
    return min(told) if told and len(told) == len(facts.ranks) else None


def sure(facts: JobFacts, most: Confidence = Confidence.MEDIUM) -> Confidence:
    """``most``, or low on few steps or where ranks are missing."""
    return Confidence.LOW if facts.few_steps or facts.missing_ranks else most


def gib(count: float) -> str:
    """Bytes as GiB for a sentence; as MiB where that would read 0.0."""
    return f"{count / GIB:.1f} GiB" if count >= 0.1 * GIB else f"{count / MIB:.3g} MiB"
