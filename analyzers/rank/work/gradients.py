"""How large the gradients are that a backward leaves, in the order in which they are ready.

Autograd ends in one function per parameter, ``AccumulateGrad``, whose input is the parameter's gradient: with shapes
recorded it shows what buckets are filled with, and in which order.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from perfscope.analyzers.rank.collectives.tensors import input_tensors
from perfscope.analyzers.rank.steps import Steps
from perfscope.grouping import grouped
from perfscope.trace.trace import NONE, Category, Trace

_ACCUMULATE: Final = "torch::autograd::AccumulateGrad"


def gradient_bytes(trace: Trace, steps: Steps) -> tuple[int, ...]:
    """Bytes of each parameter's gradient in the order in which they are ready in most steps, those of every backward of
    a step; empty where they, or their shapes, are not recorded.
    """
    rows = trace.rows(Category.CPU_OP, named=lambda name: name == _ACCUMULATE)
    if len(rows) == 0 or (trace.shapes[rows] == NONE).any():
        return ()
    of_step = steps.of_host_time(trace.start_ns[rows]).tolist()
    sizes: dict[tuple[int, int], int] = {}
    keys = list(zip(trace.shapes[rows].tolist(), trace.types[rows].tolist(), strict=True))
    for key, row in zip(keys, rows.tolist(), strict=True):
        if key not in sizes:
            sizes[key] = input_tensors(trace, row)[1]
    if NONE in sizes.values():
        return ()
    by_step = grouped((step, sizes[key]) for step, key in zip(of_step, keys, strict=True) if step >= 0)
    every = Counter(tuple(of_step) for of_step in by_step.values())
    return every.most_common(1)[0][0] if every else ()
