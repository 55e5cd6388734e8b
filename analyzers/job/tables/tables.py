"""The tables of launches and of named ranges: every rank's, merged."""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.rank.work.tables import OTHER_RANGES
from perfscope.results.tables import LaunchRow, ModuleRow
from perfscope.trace.trace import Float64

LISTED_RANGES: Final = 100
"""Ranges in the table; the cheaper ones are left out: ranges are nested, so that their sum means nothing."""


def launch_rows(result: AlignedJob) -> tuple[LaunchRow, ...]:
    """One row for each rank with device work whose launches are recorded. Medians are the mean of the steps' own."""
    rows = []
    for rank, partial in sorted(result.partials.items()):
        times, used = partial.tables.launches, partial.steps.indices_of(result.steps)
        calls, kernels = int(times.calls[used].sum()), int(times.kernels[used].sum())
        if calls == 0:
            continue
        rows.append(
            LaunchRow(
                rank=rank,
                launches_per_step=calls / len(used),
                call_us_mean=int(times.call_ns[used].sum()) / calls / 1e3,
                delay_us_median=_mean(times.delay_median_ns[used], 1e3),
                delay_us_p95=_mean(times.delay_p95_ns[used], 1e3),
                queue_depth_median=_mean(times.depth_median[used], 1.0),
                starved_share=int(times.starved[used].sum()) / calls,
                short_kernels_share=int(times.short[used].sum()) / kernels if kernels else None,
            )
        )
    return tuple(rows)


def _mean(values: Float64, unit: float) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) / unit if len(known) else None


def module_rows(result: AlignedJob) -> tuple[ModuleRow, ...]:
    """One row per name, the costliest first: by device time, and by host time where nothing is launched."""
    totals: dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
    depths: dict[str, int] = {}
    for partial in result.partials.values():
        times, used = partial.tables.modules, partial.steps.indices_of(result.steps)
        tables = (times.count, times.host_ns, times.device_ns, times.kernels)
        table = np.stack([part[:, used].sum(axis=1) for part in tables], axis=1)
        for line, name in enumerate(times.names):
            if name == OTHER_RANGES or table[line, 0] == 0:
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
        for name in ordered[:LISTED_RANGES]
        for count, host, device, kernels in [totals[name].tolist()]
    )
