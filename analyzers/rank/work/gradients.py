"""How many gradients a backward leaves, and how large they are, in the order in which they are ready.

Autograd ends in one function per parameter, ``AccumulateGrad``, whose input is the parameter's gradient: with shapes
recorded it shows what buckets are filled with, and in which order. DistributedDataParallel's hook runs in the one that
fills a bucket, and reduces it there: so without shapes it still shows how many gradients are in each.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Final

import numpy as np

from perfscope.analyzers.rank.collectives.autograd import OF_PARAMETER, in_parameters
from perfscope.analyzers.rank.collectives.tensors import input_tensors
from perfscope.analyzers.rank.steps import Steps
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.trace.trace import NONE, Category, Trace

_ACCUMULATE: Final = "torch::autograd::AccumulateGrad"
_REDUCE: Final = "c10d::allreduce_"


@dataclass(frozen=True)
class ReducedGradients:
    """Of a step, all its backwards: the number of gradients, and after how many of them each all-reduce is issued."""

    count: int = 0
    after: tuple[int, ...] = ()

    def in_buckets(self, backwards: int) -> tuple[int, ...]:
        """How many there are in each bucket of the last of so many backwards; empty where they do not divide so."""
        if self.count % backwards:
            return ()
        before = self.count - self.count // backwards
        ends = [before, *(place for place in self.after if place > before)]
        return tuple(last - first for first, last in pairwise(ends))


def reduced_gradients(trace: Trace, steps: Steps) -> ReducedGradients:
    """As in most steps; none where DistributedDataParallel's hooks are not recorded."""
    issued = trace.start_ns[trace.rows(Category.CPU_OP, named=_REDUCE.__eq__)]
    issued = np.sort(issued[in_parameters(trace, issued)])
    if len(issued) == 0:
        return ReducedGradients()
    edges = np.stack((steps.host_start_ns, steps.host_end_ns), axis=1)
    ready = np.sort(trace.start_ns[trace.rows(Category.CPU_OP, named=OF_PARAMETER.__eq__)])
    found: Counter[ReducedGradients] = Counter()
    for begin, end in edges.tolist():
        mine = ready[(ready >= begin) & (ready < end)]
        after = np.searchsorted(mine, issued[(issued >= begin) & (issued < end)], side="right")
        found[ReducedGradients(len(mine), tuple(after.tolist()))] += 1
    return found.most_common(1)[0][0] if found else ReducedGradients()


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
