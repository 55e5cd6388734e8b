"""The table of named ranges: every rank's modules and phases by name, merged."""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.work.module_times import OTHERS
from perfscope.summary_tables import ModuleRow

LISTED: Final = 100
"""Ranges in the table; the cheaper ones are left out, since ranges lie inside one another and add up to nothing."""


def module_rows(result: Comparison) -> tuple[ModuleRow, ...]:
    """One row a name, the costliest first: by device time, and by host time where nothing is launched."""
    totals: dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
    depths: dict[str, int] = {}
    for partial in result.partials.values():
        times, used = partial.tables.modules, partial.steps.indices_of(result.steps)
        tables = (times.count, times.host_ns, times.device_ns, times.kernels)
        table = np.stack([part[:, used].sum(axis=1) for part in tables], axis=1)
        for line, name in enumerate(times.names):
            if name == OTHERS or table[line, 0] == 0:
                continue
            totals[name] = totals[name] + table[line] if name in totals else table[line]
            depths[name] = min(depths.get(name, int(times.depth[line])), int(times.depth[line]))
    shares = len(result.partials) * len(result.steps)
    ordered = sorted(totals, key=lambda name: (-int(totals[name][2]), -int(totals[name][1]), name))
    return tuple(
        ModuleRow(
            name=name,
            depth=depths[name],
            count_per_step=count / shares,
            host_us_per_step=host / shares / 1e3,
            device_us_per_step=device / shares / 1e3,
            kernels_per_step=kernels / shares,
        )
        for name in ordered[:LISTED]
        for count, host, device, kernels in [totals[name].tolist()]
    )
