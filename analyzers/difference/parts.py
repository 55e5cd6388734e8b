"""The critical path, the collectives and the ranks of two recordings side by side."""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import median
from typing import Final

from perfscope.analyzers.difference.noise import beyond_noise
from perfscope.comparison import CollectiveChange, PathChange, RankChange, StepChange
from perfscope.summary import AccountRow, CollectiveRow, Summary

_Key = tuple[str, str, str | None, int | None]
_WAIT: Final = "exposed_comm_wait"

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
    changes = [_collective(key, first.get(key), second.get(key), step) for key in {**first, **second}]
    return tuple(sorted(changes, key=lambda change: -abs(change.delta_us)))


class _Collective:
    """Rows of one key together, per step."""

    def __init__(self) -> None:
        self.count = 0.0
        self.transfer = 0.0
        self.wait: float | None = 0.0
        self.busbw: float | None = None

    def add(self, row: CollectiveRow, steps: int) -> None:
        count = row.count / steps
        self.count += count
        self.transfer += count * row.transfer_us
        self.wait = None if row.wait_us is None or self.wait is None else self.wait + count * row.wait_us
        self.busbw = row.busbw_gbps

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


def _collective(key: _Key, first: _Collective | None, second: _Collective | None, step: StepChange) -> CollectiveChange:
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
        real=beyond_noise(delta, step),
    )


def rank_changes(before: Summary, after: Summary, step: StepChange) -> tuple[RankChange, ...]:
    """Ranks that both recordings hold; those whose own work changed otherwise than their peers' stand out."""
    first = {row.rank: row for row in before.accounting}
    both = [(first[row.rank], row) for row in after.accounting if row.rank in first]
    if not both:
        return ()
    typical = median(_own(old, new) for old, new in both)
    changes = []
    for old, new in both:
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
                stands_out=len(both) > 2 and _differs(_own(old, new), typical, step),
            )
        )
    return tuple(changes)


def _differs(own: float, typical: float, step: StepChange) -> bool:
    """Beyond the noise, and by a share of what all ranks changed by."""
    return beyond_noise(own - typical, step) is True and abs(own - typical) >= _APART * abs(typical)


def _own(old: AccountRow, new: AccountRow) -> float:
    """Change of the rank's own work: all but waiting for others."""
    return (new.step_time_us - new.rows()[_WAIT]) - (old.step_time_us - old.rows()[_WAIT])
