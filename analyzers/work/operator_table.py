"""The table of operators: every rank's operators by name, merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.flops.utilisation import resolved_type
from perfscope.analyzers.work.kernel_classes import OTHER
from perfscope.analyzers.work.kernel_table import share_of_peak
from perfscope.analyzers.work.operator_times import OTHERS, OperatorTimes
from perfscope.hardware import DevicePeaks
from perfscope.summary_tables import OperatorRow
from perfscope.trace import Int64

LISTED: Final = 100
"""Operators in the table; the cheaper ones are added up in one row."""


@dataclass
class _Total:
    """One operator over all ranks and used steps."""

    count: int = 0
    host_ns: int = 0
    device_ns: int = 0
    kernels: int = 0
    flops: float = 0.0
    flops_ns: int = 0
    leading_ns: int = -1
    operator_class: str = OTHER
    dtype: str | None = None

    @property
    def cost(self) -> int:
        """What it is ranked by."""
        return self.device_ns + self.host_ns

    def add(self, count: int, host_ns: int, device_ns: int, kernels: int, flops: float, flops_ns: int) -> None:
        """Add another rank's numbers, or another operator's."""
        self.count += count
        self.host_ns += host_ns
        self.device_ns += device_ns
        self.kernels += kernels
        self.flops += flops
        self.flops_ns += flops_ns


def operator_rows(result: Comparison, peaks: DevicePeaks | None) -> tuple[OperatorRow, ...]:
    """One row an operator, the costliest first: by device and own host time together."""
    totals: dict[str, _Total] = {}
    for partial in result.partials.values():
        _add_rank(totals, partial.tables.operators, partial.steps.indices_of(result.steps))
    ordered = sorted(totals, key=lambda name: (name == OTHERS, -totals[name].cost, name))
    rest = _Total()
    for name in [name for at, name in enumerate(ordered) if at >= LISTED or name == OTHERS]:
        entry = totals.pop(name)
        rest.add(entry.count, entry.host_ns, entry.device_ns, entry.kernels, entry.flops, entry.flops_ns)
    if rest.cost:
        totals[OTHERS] = rest
    shares = len(result.partials) * len(result.steps)
    return tuple(
        _row(name, entry, shares, peaks)
        for name, entry in sorted(totals.items(), key=lambda item: (-item[1].cost, item[0]))
    )


def _add_rank(totals: dict[str, _Total], times: OperatorTimes, used: Int64) -> None:
    count, host, device, kernels = (
        table[:, used].sum(axis=1) for table in (times.count, times.host_ns, times.device_ns, times.kernels)
    )
    flops, flops_ns = np.zeros(len(count)), np.zeros(len(count), dtype=np.int64)
    flops[times.flops_line] = times.flops[:, used].sum(axis=1)
    flops_ns[times.flops_line] = times.flops_ns[:, used].sum(axis=1)
    columns = (column.tolist() for column in (count, host, device, kernels, flops, flops_ns))
    for line, numbers in enumerate(zip(*columns, strict=True)):
        if not any(numbers):
            continue
        entry = totals.setdefault(times.names[line], _Total())
        entry.add(*numbers)
        cost = numbers[1] + numbers[2]
        if cost > entry.leading_ns:
            entry.leading_ns = cost
            entry.operator_class, entry.dtype = times.operator_class[line], times.dtype[line]


def _row(name: str, total: _Total, shares: int, peaks: DevicePeaks | None) -> OperatorRow:
    dtype = resolved_type(total.dtype, peaks)
    tflops = total.flops / total.flops_ns / 1e3 if total.flops_ns else None
    return OperatorRow(
        name=name,
        operator_class=total.operator_class,
        count_per_step=total.count / shares,
        device_us_per_step=total.device_ns / shares / 1e3,
        host_us_per_step=total.host_ns / shares / 1e3,
        kernels_per_step=total.kernels / shares,
        flops_per_step=total.flops / shares if total.flops_ns else None,
        tflops=tflops,
        share_of_peak=share_of_peak(tflops, dtype, peaks),
        dtype=dtype,
    )
