"""The critical path, the collectives and the ranks of two recordings side by side."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Final

import numpy as np

from perfscope.analyzers.difference.noise import parts_are_real
from perfscope.comparison import CollectiveChange, PathChange, RankChange, StepChange
from perfscope.summary import AccountRow, CollectiveRow, Summary
from perfscope.trace import Float64

_Key = tuple[str, str, str | None, int | None]
_APART: Final = 0.25
"""Share of the ranks' median change by which a rank's must differ from it to be named."""


def path_changes(before: Summary, after: Summary) -> tuple[PathChange, ...]:
    """The critical path by category; empty where either job has none, or one that is not of its whole step."""
    if not _has_whole_path(before) or not _has_whole_path(after):
        return ()
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for place, summary in enumerate((before, after)):
        for row in summary.critical_path or ():
            totals[row.category][place] += row.us
    changes = [
        PathChange(category=name, before_us=first, after_us=second, delta_us=second - first)
        for name, (first, second) in totals.items()
    ]
    return tuple(sorted(changes, key=lambda change: -abs(change.delta_us)))


def _has_whole_path(summary: Summary) -> bool:
    if summary.critical_path is None:
        return False
    return math.isclose(math.fsum(row.us for row in summary.critical_path), summary.job.step_time_us, rel_tol=1e-9)


def collective_changes(before: Summary, after: Summary, step: StepChange) -> tuple[CollectiveChange, ...]:
    """Every (group, kind, type, size) of either job, the largest change first.

    Groups are told by name; where the names differ, by what they are for.
    """
    first, second = _collectives(before), _collectives(after)
    if not {key[0] for key in first} & {key[0] for key in second}:
        first, second = _collectives(before, by_role=True), _collectives(after, by_role=True)
    both = [(key, first.get(key), second.get(key)) for key in {**first, **second}]
    pairs = [(_times(old, before), _times(new, after)) for _, old, new in both]
    totals = [(old.transfer if old else 0.0, new.transfer if new else 0.0) for _, old, new in both]
    real = parts_are_real(pairs, [new - old for old, new in totals], [max(each) for each in totals], step)
    changes = [_collective(*each, is_real) for each, is_real in zip(both, real, strict=True)]
    return tuple(sorted(changes, key=lambda change: -abs(change.delta_us)))


class _Collective:
    """Rows of one key together, per step."""

    def __init__(self) -> None:
        self.count = 0.0
        self.transfer = 0.0
        self.wait: float | None = 0.0
        self.busbw: float | None = None
        self.per_step: Float64 = np.zeros(0)

    def add(self, row: CollectiveRow, steps: int) -> None:
        count = row.count / steps
        self.count += count
        self.transfer += count * row.transfer_us
        self.wait = None if row.wait_us is None or self.wait is None else self.wait + count * row.wait_us
        self.busbw = row.busbw_gbps
        times = np.array(row.transfer_us_per_step)
        self.per_step = self.per_step + times if len(self.per_step) == len(times) else times

    @property
    def one_us(self) -> float | None:
        return self.transfer / self.count if self.count else None


def _collectives(summary: Summary, by_role: bool = False) -> dict[_Key, _Collective]:
    roles = {row.name: f"{row.role} group" for row in summary.groups} if by_role else {}
    steps = max(len(summary.job.steps), 1)
    found: dict[_Key, _Collective] = defaultdict(_Collective)
    for row in summary.collectives:
        found[roles.get(row.group, row.group), row.kind, row.dtype, row.bytes].add(row, steps)
    return found


def _times(collective: _Collective | None, summary: Summary) -> Float64:
    """Transfer in each used step, µs: none where the other job alone has it; empty where the steps are not known."""
    return collective.per_step if collective is not None else np.zeros(len(summary.job.steps))


def _collective(
    key: _Key, first: _Collective | None, second: _Collective | None, real: bool | None
) -> CollectiveChange:
    before, after = first or _Collective(), second or _Collective()
    delta = after.transfer - before.transfer
    wait = after.wait - before.wait if after.wait is not None and before.wait is not None else None
    group, kind, dtype, size = key
    return CollectiveChange(
        group=group,
        kind=kind,
        dtype=dtype,
        bytes=size,
        status="new" if first is None else "gone" if second is None else "both",
        count_before=before.count,
        count_after=after.count,
        transfer_before_us=before.one_us,
        transfer_after_us=after.one_us,
        busbw_before_gbps=before.busbw,
        busbw_after_gbps=after.busbw,
        before_us=before.transfer,
        after_us=after.transfer,
        delta_us=delta,
        wait_delta_us=wait,
        real=real,
    )


def rank_changes(before: Summary, after: Summary, step: StepChange) -> tuple[RankChange, ...]:
    """Ranks that both recordings hold; those whose own work changed otherwise than their peers' stand out."""
    first = {row.rank: row for row in before.accounting}
    both = [(first[row.rank], row) for row in after.accounting if row.rank in first]
    if not both:
        return ()
    typical = median(_own(old, new) for old, new in both)
    apart = [_own(old, new) - typical for old, new in both]
    pairs = list(zip(*(_beside_peers(rows) for rows in zip(*both, strict=True)), strict=True))
    sizes = [max(_work(old), _work(new)) for old, new in both]
    real = parts_are_real(pairs, apart, sizes, step)
    changes = []
    for (old, new), differs, is_real in zip(both, apart, real, strict=True):
        rows = {name: value - old.rows()[name] for name, value in new.rows().items()}
        changes.append(
            RankChange(
                rank=new.rank,
                host_before=old.host,
                host_after=new.host,
                before_us=old.step_time_us,
                after_us=new.step_time_us,
                delta_us=new.step_time_us - old.step_time_us,
                rows_us=rows,
                stands_out=len(both) > 2 and is_real is True and abs(differs) >= _APART * abs(typical),
            )
        )
    return tuple(changes)


def _beside_peers(rows: Sequence[AccountRow]) -> list[Float64]:
    """Each rank's own work in each step, less the ranks' median of it: what all share is no rank's. Empty where that
    is not known.
    """
    if len({len(row.own_us_per_step) for row in rows}) > 1:
        return [np.zeros(0) for _ in rows]
    own = np.array([row.own_us_per_step for row in rows])
    return list(own - np.median(own, axis=0))


def _own(old: AccountRow, new: AccountRow) -> float:
    """Change of the rank's own work."""
    return _work(new) - _work(old)


def _work(row: AccountRow) -> float:
    """The rank's own work: all but waiting for others."""
    return row.step_time_us - row.exposed_comm_wait_us
