"""The table of launches: how each rank feeds its device."""

from __future__ import annotations

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.summary_tables import LaunchRow
from perfscope.trace import Float64


def launch_rows(result: Comparison) -> tuple[LaunchRow, ...]:
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
