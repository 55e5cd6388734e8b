"""The table of operators: every rank's operators by name, merged."""

from __future__ import annotations

from collections import defaultdict
from typing import Final, NamedTuple

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.tables.kernels import flop_sums, share_of_peak
from perfscope.analyzers.job.utilisation import resolved_type
from perfscope.analyzers.rank.kernel_classes import OTHER
from perfscope.analyzers.rank.work.tables import OTHER_OPERATORS
from perfscope.results.tables import OperatorRow
from perfscope.trace.hardware import DevicePeaks
from perfscope.trace.trace import Float64

LISTED: Final = 100
"""Operators in the table; the cheaper ones are added up in one row."""


class _Leading(NamedTuple):
    """An operator on the rank that has most of it: its cost there, and what the table says of it."""

    cost: float
    operator_class: str
    dtype: str | None
    called_by: str = ""
    function: str = ""


def operator_rows(result: AlignedJob, peaks: DevicePeaks | None) -> tuple[OperatorRow, ...]:
    """One row per operator, the costliest first: by device and own host time together."""
    # Over all ranks and used steps: calls, host ns, device ns, kernels, FLOPs, ns of the calls that do them.
    totals: defaultdict[str, Float64] = defaultdict(lambda: np.zeros(6))
    # What it is on the rank that has most of it.
    leading: dict[str, _Leading] = {}
    for partial in result.partials.values():
        times, used = partial.tables.operators, partial.steps.indices_of(result.steps)
        sums = (table[:, used].sum(axis=1) for table in (times.count, times.host_ns, times.device_ns, times.kernels))
        for line, own in enumerate(np.stack((*sums, *flop_sums(times, used)), axis=1)):
            if own.any():
                name = times.names[line]
                totals[name] += own
                if name not in leading or _cost(own) > leading[name].cost:
                    callers = (
                        of_line[line] if line < len(of_line) else "" for of_line in (times.called_by, times.function)
                    )
                    leading[name] = _Leading(_cost(own), times.operator_class[line], times.dtype[line], *callers)
    ordered = sorted(totals, key=lambda name: (name == OTHER_OPERATORS, -_cost(totals[name]), name))
    rest = np.zeros(6)
    for name in [name for at, name in enumerate(ordered) if at >= LISTED or name == OTHER_OPERATORS]:
        rest += totals.pop(name)
    if _cost(rest):
        totals[OTHER_OPERATORS], leading[OTHER_OPERATORS] = rest, _Leading(0.0, OTHER, None)
    shares = len(result.partials) * len(result.steps)
    return tuple(
        _row(name, totals[name], leading[name], shares, peaks)
        for name in sorted(totals, key=lambda name: (-_cost(totals[name]), name))
    )


def _cost(total: Float64) -> float:
    """What an operator is ranked by."""
    return float(total[1] + total[2])


def _row(name: str, total: Float64, leading: _Leading, shares: int, peaks: DevicePeaks | None) -> OperatorRow:
    dtype = resolved_type(leading.dtype, peaks)
    count, host_ns, device_ns, kernels, flops, flops_ns = total.tolist()
    tflops = flops / flops_ns / 1e3 if flops_ns else None
    return OperatorRow(
        name=name,
        operator_class=leading.operator_class,
        count_per_step=count / shares,
        device_us_per_step=device_ns / shares / 1e3,
        host_us_per_step=host_ns / shares / 1e3,
        kernels_per_step=kernels / shares,
        flops_per_step=flops / shares if flops_ns else None,
        tflops=tflops,
        share_of_peak=share_of_peak(tflops, dtype, peaks),
        dtype=dtype,
        called_by=leading.called_by,
        function=leading.function,
    )
