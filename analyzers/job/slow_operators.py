"""The operators in which a rank computes longer than the others, where it is a few above all: they call them as often,
or less, as where one rank alone computes a metric, evaluates or logs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.rank.kernel_classes import OTHER, PRODUCTS, class_of_operator
from perfscope.analyzers.rank.time_breakdown import NOT_COMPUTE
from perfscope.analyzers.rank.work.tables import OTHER_OPERATORS
from perfscope.frozen import dataclass
from perfscope.results.rows import StragglerRow

_ABOVE_ALL: Final = 0.5
"""Part of what a rank computes for longer, and of what that costs the job, that the operator has at least."""
_APART: Final = 2.0
"""The operator is that many times as much slower than the peers' as all others are: on a device that is slow, or where
there is more work, all are slower alike."""

_LONGER: Final = 1.1
"""From this ratio on the kernels of an operator take longer than the peers'."""
_AS_QUICK: Final = 1.03
"""Up to this ratio kernels are as quick: their durations differ by some percent."""
_ENOUGH: Final = 0.25
"""Time of kernels that are as quick, at least, over that of like ones that are not: few would show little of clocks."""
_ALONE: Final = 1.0
"""Calls per step of an operator that nobody else calls, from which a rank does something else than the others."""
_NAMED: Final = 0.8
"""Part of what they take longer from which the operators that are named tell enough."""
_FEW: Final = 3
"""Most operators that are named: more are another kind of slowness."""

_SCOPES_OF: Final = {"compute": ("rank", "job"), "launch": ("rank",), "sync": ("rank",)}
"""Cause -> scopes of stragglers whose operators are compared."""


_Operators = Mapping[str, tuple[float, float]]
"""Name -> (calls, µs) per used step."""


@dataclass(frozen=True)
class SlowOperator:
    """An operator's time per step on a rank and on the others (median), µs: on devices its kernels', else its own on
    the host; both 0 where only how often it is called tells. Of several operators the names are joined, and the times
    added up.
    """

    name: str
    own_us: float
    others_us: float
    calls: float = 0.0
    others_calls: float = 0.0
    """Per step, where the rank calls it more often than the others; both 0 where all call it as often."""
    kind: str = ""
    """The class of its kernels, where the rank's other kernels are as quick as the peers', also those that need the
    same of the device: its clocks would slow these too. Empty where they do not show that.
    """
    alone: str = ""
    """What nobody else calls, where the rank calls most operators more often than the others do."""

    @property
    def is_own_work(self) -> bool:
        """Does the rank do what the others do not?"""
        return self.calls > self.others_calls


def slow_operators(result: AlignedJob, stragglers: Collection[StragglerRow]) -> dict[int, SlowOperator]:
    """Straggler that computes longer, or whose host launches or waits for its device for longer -> the operator that
    this is. Without those where it is none above all.
    """
    found = {
        row.rank: _slowest(result, row) if row.cause == "compute" else _called_more_often(result, row)
        for row in stragglers
        if row.scope in _SCOPES_OF.get(row.cause, ())
    }
    return {rank: operator for rank, operator in found.items() if operator is not None}


def _slowest(result: AlignedJob, row: StragglerRow) -> SlowOperator | None:
    mine = _per_step(result, row.rank)
    others = [_per_step(result, rank) for rank in result.partials if rank not in row.members]
    few = _slower_beside_equals(row, mine, others) if result.partials[row.rank].has_device_work else None
    return few or _slower(row, mine, others) or _of_its_own(row, mine, others)


def _called_more_often(result: AlignedJob, row: StragglerRow) -> SlowOperator | None:
    """What a host launches more often than the others' do; where it waits for its device, what it waits in more often:
    each of these waits is short where the one before has left nothing to wait for.
    """
    mine = _per_step(result, row.rank, of_host=True)
    others = [_per_step(result, rank, of_host=True) for rank in result.partials if rank not in row.members]
    if not others:
        return None
    if row.cause != "sync":
        return _of_its_own(row, mine, others)
    usual = _usual_of(mine, others)
    waiting = set(result.partials[row.rank].tables.syncs.operators) & mine.keys()
    more = {name: mine[name][0] - usual[name][0] for name in waiting if mine[name][0] > _APART * usual[name][0]}
    if not more or not _mostly_alike(mine, usual):
        return None
    name = max(sorted(more), key=more.__getitem__)
    return SlowOperator(name, 0.0, 0.0, mine[name][0], usual[name][0])


def _usual_of(mine: _Operators, others: Sequence[_Operators]) -> _Operators:
    """The median of the others, for every operator that any rank calls."""
    names = {name for each in (mine, *others) for name in each}
    every = {name: [each.get(name, (0.0, 0.0)) for each in others] for name in names}
    return {name: (median(calls for calls, _ in each), median(us for _, us in each)) for name, each in every.items()}


def _mostly_alike(mine: _Operators, usual: _Operators) -> bool:
    """Does the rank call most operators as often as the others, or those that take most of the time? With more samples
    it calls all of them more often; what it does itself calls the small ones, too, that views and copies are made of.
    """
    every = np.array([*usual.values()]).reshape(-1, 2)
    as_often = np.array([mine.get(name, (0.0, 0.0))[0] == often for name, (often, _) in usual.items()], dtype=np.bool_)
    return bool((every[as_often].sum(axis=0) >= _ABOVE_ALL * every.sum(axis=0)).any())


def _of_its_own(row: StragglerRow, mine: _Operators, others: Sequence[_Operators]) -> SlowOperator | None:
    """What the rank calls more often than the others do, where that is most of what it costs. With more samples it
    calls all operators more often, or all take longer: most are called as often where it does something else, or some
    are called by nobody else, as where it alone has the model generate text.
    """
    if not others:
        return None
    usual = _usual_of(mine, others)
    over = {name: mine[name][1] - usual[name][1] for name in mine if mine[name][0] > usual[name][0]}
    if not over or sum(over.values()) < _ABOVE_ALL * row.lost_us:
        return None
    alike = _mostly_alike(mine, usual)
    alone = {name: us for name, (calls, us) in mine.items() if calls >= _ALONE and not any(name in o for o in others)}
    if not alike and not alone:
        return None
    name = max(sorted(over), key=lambda name: over[name])
    beside = "" if alike else max(sorted(alone), key=lambda name: alone[name])
    return SlowOperator(name, mine[name][1], usual[name][1], mine[name][0], usual[name][0], alone=beside)


def _slower_beside_equals(row: StragglerRow, mine: _Operators, others: Sequence[_Operators]) -> SlowOperator | None:
    """The operators whose kernels take longer, where all the others' take as long as the peers'. On a device with low
    clocks all products are slower, and with slow memory everything else is: kernels of both sorts must show that they
    are not, where some of that sort take longer.

    Example, ms on a rank and on its peers: aten::bmm 9 and 5, aten::gelu 0.6 and 0.3, aten::mm 2 and 2, aten::add 1 and
    1. The rank has more tokens for its experts.
    """
    usual = {name: us for name, (calls, _) in mine.items() if (us := _usual(name, calls, others))}
    over = {name: mine[name][1] - us for name, us in usual.items() if mine[name][1] >= _LONGER * us}
    rest = usual.keys() - over.keys()
    saved_us, of_rest = sum(over.values()), sum(usual[name] for name in rest)
    if not over or saved_us < _ABOVE_ALL * row.lost_us or sum(mine[name][1] for name in rest) > _AS_QUICK * of_rest:
        return None
    for products in (True, False):
        slow, quick = (sum(usual[name] for name in names if _is_product(name) is products) for names in (over, rest))
        if quick < _ENOUGH * slow:
            return None
    ordered = sorted(over, key=lambda name: (-over[name], name))
    shares = np.cumsum([over[name] for name in ordered]) / saved_us
    named = ordered[: int(np.searchsorted(shares, _NAMED)) + 1]
    if len(named) > _FEW:
        return None
    own_us, others_us = sum(mine[name][1] for name in named), sum(usual[name] for name in named)
    return SlowOperator(_listed(named), own_us, others_us, kind=class_of_operator(named[0]) or OTHER)


def _is_product(name: str) -> bool:
    return class_of_operator(name) in PRODUCTS


def _listed(names: Sequence[str]) -> str:
    """``aten::mm``, ``aten::mm and aten::bmm``, ``aten::mm, aten::bmm and aten::addmm``."""
    return " and ".join(([", ".join(names[:-1])] if len(names) > 1 else []) + [names[-1]])


def _slower(row: StragglerRow, mine: _Operators, others: Sequence[_Operators]) -> SlowOperator | None:
    usual = {name: _usual(name, calls, others) for name, (calls, _) in mine.items()}
    shared = {name: us for name, us in usual.items() if us is not None}
    over = {name: mine[name][1] - us for name, us in shared.items()}
    if not over:
        return None
    name = max(sorted(over), key=lambda name: over[name])
    if over[name] < _ABOVE_ALL * max(sum(over.values()), row.lost_us):
        return None
    rest, rest_of_others = sum(mine[each][1] for each in shared), sum(shared.values())
    rest, rest_of_others = rest - mine[name][1], rest_of_others - shared[name]
    alike = rest / rest_of_others if rest_of_others > 0 else 1.0
    if mine[name][1] < _APART * max(alike, 1.0) * shared[name]:
        return None
    return SlowOperator(name, mine[name][1], shared[name])


def _usual(name: str, calls: float, others: Sequence[_Operators]) -> float | None:
    """µs of an operator on the other ranks that call it as often; None where none does."""
    alike = [each[name][1] for each in others if name in each and each[name][0] == calls]
    return median(alike) if alike else None


def _per_step(result: AlignedJob, rank: int, *, of_host: bool = False) -> _Operators:
    """Those that compute: what ranks send to one another they wait for, and an inner stage sends twice as much."""
    partial = result.partials[rank]
    times, used = partial.tables.operators, partial.steps.indices_of(result.steps)
    spent = times.device_ns if partial.has_device_work and not of_host else times.host_ns
    count, us = times.count[:, used].sum(axis=1) / len(used), spent[:, used].sum(axis=1) / len(used) / 1e3
    return {
        name: (calls, each)
        for name, calls, each in zip(times.names, count.tolist(), us.tolist(), strict=True)
        if name != OTHER_OPERATORS and calls and not NOT_COMPUTE.match(name)
    }
