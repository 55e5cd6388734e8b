"""One rank's operators by name: calls, own time on the host, device work that they launch, FLOPs."""

from __future__ import annotations

import numpy as np

from perfscope.analyzers.rank import kernel_classes as classes
from perfscope.analyzers.rank.attribution import Attribution
from perfscope.analyzers.rank.launches import DeviceWork
from perfscope.analyzers.rank.nesting import Nested
from perfscope.analyzers.rank.steps import Steps
from perfscope.analyzers.rank.work.callers import callers
from perfscope.analyzers.rank.work.flops import product_type
from perfscope.analyzers.rank.work.kernel_times import ClassedWork
from perfscope.analyzers.rank.work.per_step import amounts, heaviest, lines_of, sums
from perfscope.analyzers.rank.work.tables import CLASSES, OTHER_OPERATORS, OperatorTimes
from perfscope.frozen import dataclass
from perfscope.trace.trace import NONE, Bool, Float64, Int64, Trace


@dataclass(frozen=True, eq=False)
class _Counted:
    """FLOPs in parts: of which operator (``place``), in which step, how many, in how much time, of which type."""

    place: Int64
    step: Int64
    flops: Float64
    length_ns: Int64
    types: list[str | None]
    kind: Int64
    """Index into ``types``."""


def operator_times(
    trace: Trace, work: DeviceWork, steps: Steps, attribution: Attribution, classed: ClassedWork
) -> OperatorTimes:
    """Add up the operators of each step by name."""
    operators = attribution.operators
    own = operators.own_ns()
    host_step = steps.of_host_time(trace.start_ns[operators.row])
    launcher = attribution.operator[classed.index]
    launched = np.flatnonzero(launcher != NONE)
    in_step = host_step >= 0
    # Work launched in one step may run in the next: an operator is listed in both cases.
    is_listed = in_step.copy()
    is_listed[launcher[launched]] = True
    line = np.full(len(operators), NONE, dtype=np.int64)
    cost = np.bincount(launcher[launched], weights=classed.length_ns[launched], minlength=len(operators))
    np.add(cost, own, out=cost, where=in_step)
    names, line[is_listed] = lines_of(
        trace.name[operators.row[is_listed]], cost[is_listed], trace.strings.__getitem__, OTHER_OPERATORS
    )
    called_by, function = callers(trace, operators, line, np.asarray(cost, dtype=np.float64))
    del cost
    lines = len(names)
    counted = _counted(trace, work, attribution, classed, host_step)
    flops_line, position = np.unique(line[counted.place], return_inverse=True)
    size = (lines, len(steps))
    on_device = (line[launcher[launched]], classed.step[launched], *size)
    types = heaviest(line[counted.place], counted.kind, counted.flops, lines)
    return OperatorTimes(
        names=tuple(names),
        operator_class=_classes(names, line[launcher[launched]], classed.kind[launched], classed.length_ns[launched]),
        dtype=tuple(counted.types[index] if index != NONE else None for index in types),
        count=sums(line, host_step, *size, chosen=in_step & ~_passed_on(trace, operators)),
        host_ns=sums(line, host_step, *size, own, chosen=in_step),
        device_ns=sums(*on_device, classed.length_ns[launched]),
        kernels=sums(*on_device),
        flops_line=flops_line,
        flops=amounts(position, counted.step, len(flops_line), len(steps), counted.flops),
        flops_ns=sums(position, counted.step, len(flops_line), len(steps), counted.length_ns),
        called_by=called_by,
        function=function,
    )


def _passed_on(trace: Trace, operators: Nested) -> Bool:
    """The operators that one of the same name calls: ``aten::sort`` passes its call on to an overload with more
    arguments, which is recorded as another inside it.
    """
    name = trace.name[operators.row]
    inner = operators.parent >= 0
    return np.asarray(inner & (name[operators.parent] == name), dtype=np.bool_)


def _counted(
    trace: Trace, work: DeviceWork, attribution: Attribution, classed: ClassedWork, host_step: Int64
) -> _Counted:
    calls = attribution.calls
    if len(work) == 0:
        at = np.flatnonzero((host_step[calls.place] >= 0) & (calls.hardware > 0))
        place = calls.place[at]
        length = attribution.operators.end[place] - attribution.operators.start[place]
        return _Counted(place, host_step[place], calls.hardware[at], length, list(calls.dtypes), calls.dtype[at])
    at = np.flatnonzero(attribution.flops[classed.index] > 0)
    index = classed.index[at]
    names = max(len(trace.strings), 1)
    pairs, kind = np.unique(
        calls.dtype[attribution.call[index]] * names + trace.name[work.row[index]], return_inverse=True
    )
    types = [product_type(calls.dtypes[pair // names], trace.strings[pair % names]) for pair in pairs.tolist()]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(types))}
    kind = np.array([numbers[name] for name in types], dtype=np.int64)[kind]
    return _Counted(
        attribution.operator[index],
        classed.step[at],
        attribution.flops[index],
        classed.length_ns[at],
        list(numbers),
        kind,
    )


def _classes(names: list[str], line: Int64, kind: Int64, length_ns: Int64) -> tuple[str, ...]:
    """By the operator's own name where that decides it, else by what it launches most, if it launches anything."""
    launched = heaviest(line, kind, length_ns, len(names))
    return tuple(
        classes.class_alone(name)
        if code == NONE or classes.copies(name) or classes.class_of_operator(name)
        else CLASSES[code]
        for name, code in zip(names, launched.tolist(), strict=True)
    )
