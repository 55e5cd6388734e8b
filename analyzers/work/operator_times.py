"""One rank's operators by name: calls, own time on the host, device work that they launch, FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from perfscope.analyzers.attribution import Attribution
from perfscope.analyzers.flops.of_rank import product_type
from perfscope.analyzers.launches import DeviceWork
from perfscope.analyzers.steps import Steps
from perfscope.analyzers.work import kernel_classes as classes
from perfscope.analyzers.work.kernel_times import CLASSES, ClassedWork
from perfscope.analyzers.work.per_step import amounts, distinct, heaviest, shared, sums
from perfscope.trace import NONE, Float64, Int64, Trace

OTHERS: Final = "(other operators)"
"""Name under which a rank adds up what is not among its costliest."""


@dataclass(frozen=True, eq=False)
class OperatorTimes:
    """Operators of one rank. One line a name, the costliest first; ``[lines, steps]`` for sums.

    Calls and host time by the step in whose host window a call begins; device work by the step in whose window it
    begins, under the innermost operator around its launch. ``flops`` and ``flops_ns`` are for the lines ``flops_line``
    only: on a device what its kernels computed and their time, on a host the calls' and the calls' whole length.
    """

    names: tuple[str, ...]
    operator_class: tuple[str, ...]
    dtype: tuple[str | None, ...]
    count: Int64
    host_ns: Int64
    device_ns: Int64
    kernels: Int64
    flops_line: Int64
    flops: Float64
    flops_ns: Int64

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, names=shared(state["names"]))


@dataclass(frozen=True, eq=False)
class _Counted:
    """FLOPs in parts: on which operator (place), in which step, how many, in what time, in what type."""

    place: Int64
    step: Int64
    flops: Float64
    length_ns: Int64
    types: list[str | None]
    kind: Int64
    """Index into ``types``."""


def operator_times(
    trace: Trace, work: DeviceWork, steps: Steps, found: Attribution, done: ClassedWork
) -> OperatorTimes:
    """Add up the operators of each step by name."""
    operators = found.operators
    own = operators.own_ns()
    host_step = steps.of_host_time(trace.start_ns[operators.row])
    launcher = found.operator[done.index]
    launched = np.flatnonzero(launcher != NONE)
    launches, device_ns = (
        np.bincount(launcher[launched], weights=weights, minlength=len(operators)).astype(np.int64)
        for weights in (None, done.length_ns[launched])
    )
    in_step = host_step >= 0
    # What is launched in a step may run in the next: an operator is listed for either.
    listed = np.flatnonzero(in_step | (launches > 0))
    line = np.full(len(operators), NONE, dtype=np.int64)
    cost = np.where(in_step, own, 0) + device_ns
    kept, line[listed] = distinct(trace.name[operators.row[listed]].astype(np.int64), cost[listed])
    lines = len(kept) + int((line == len(kept)).any())
    names = [trace.strings[name] for name in kept.tolist()] + [OTHERS] * (lines - len(kept))
    counted = _counted(trace, work, found, done, host_step)
    flops_line, position = np.unique(line[counted.place], return_inverse=True)
    size = (lines, len(steps))
    here = np.flatnonzero(in_step)
    on_device = (line[launcher[launched]], done.step[launched], *size)
    types = heaviest(line[counted.place], counted.kind, counted.flops, lines)
    return OperatorTimes(
        names=tuple(names),
        operator_class=_classes(names, line[launcher[launched]], done.kind[launched], done.length_ns[launched]),
        dtype=tuple(counted.types[index] if index != NONE else None for index in types),
        count=sums(line[here], host_step[here], *size),
        host_ns=sums(line[here], host_step[here], *size, own[here]),
        device_ns=sums(*on_device, done.length_ns[launched]),
        kernels=sums(*on_device),
        flops_line=flops_line,
        flops=amounts(position, counted.step, len(flops_line), len(steps), counted.flops),
        flops_ns=sums(position, counted.step, len(flops_line), len(steps), counted.length_ns),
    )


def _counted(trace: Trace, work: DeviceWork, found: Attribution, done: ClassedWork, host_step: Int64) -> _Counted:
    calls = found.calls
    if len(work) == 0:
        at = np.flatnonzero((host_step[calls.place] >= 0) & (calls.hardware > 0))
        place = calls.place[at]
        length = found.operators.end[place] - found.operators.start[place]
        return _Counted(place, host_step[place], calls.hardware[at], length, list(calls.dtypes), calls.dtype[at])
    at = np.flatnonzero(found.flops[done.index] > 0)
    index = done.index[at]
    names = max(len(trace.strings), 1)
    pairs, kind = np.unique(calls.dtype[found.call[index]] * names + trace.name[work.row[index]], return_inverse=True)
    types = [product_type(calls.dtypes[pair // names], trace.strings[pair % names]) for pair in pairs.tolist()]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(types))}
    kind = np.array([numbers[name] for name in types], dtype=np.int64)[kind]
    return _Counted(found.operator[index], done.step[at], found.flops[index], done.length_ns[at], list(numbers), kind)


def _classes(names: list[str], line: Int64, kind: Int64, length_ns: Int64) -> tuple[str, ...]:
    """By the operator's own name where that settles it, else by what it launches most, where it launches anything."""
    launched = heaviest(line, kind, length_ns, len(names))
    return tuple(
        classes.class_alone(name)
        if code == NONE or classes.copies(name) or classes.class_of_operator(name)
        else CLASSES[code]
        for name, code in zip(names, launched.tolist(), strict=True)
    )
