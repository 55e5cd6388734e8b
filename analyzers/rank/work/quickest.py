"""How long a rank's operators on the host would take if each call were as quick as the quickest of its kind.

Threads that compete for cores delay an operator now and then, by milliseconds. Training calls the same operator on
inputs of the same sizes in every layer and step, and some of these calls are not delayed. The quickest call's time
times the number of calls is what a step's operators take on a machine with a core for every thread.

Example: of 80 calls of ``aten::mm`` on [256, 512] x [512, 512] the quickest took 0.8 ms, the others up to 20: 64 ms.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any, Final

import numpy as np

from perfscope.analyzers.rank import kernel_classes as classes
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.nesting import Nested
from perfscope.analyzers.rank.steps import Steps
from perfscope.analyzers.rank.work.tables import QuickestTimes
from perfscope.trace.trace import NONE, Bool, Int64, Trace

GRAIN: Final = 32768
"""Elements from which on torch spreads an elementwise operator over its threads (``at::internal::GRAIN_SIZE``)."""
SMALL_PRODUCT: Final = 4096
"""Elements of the largest factor below which a matrix product is not worth several threads to the libraries."""


def quickest_times(
    trace: Trace, operators: Nested, steps: Steps, loading: Intervals, *, on_device: bool
) -> QuickestTimes:
    """Times of the operators that begin in each step outside ``loading``. Each operator counts its own time only."""
    none = np.zeros(len(steps), dtype=np.int64)
    if on_device:
        return QuickestTimes(none, none)
    start_ns = trace.start_ns[operators.row]
    step = steps.of_host_time(start_ns)
    at = np.flatnonzero((step >= 0) & ~loading.covers(start_ns))
    if len(at) == 0 or (trace.shapes[operators.row[at]] == NONE).all():
        return QuickestTimes(none, none)
    rows = operators.row[at]
    kinds, kind = np.unique(trace.name[rows].astype(np.int64) << 32 | (trace.shapes[rows] + 1), return_inverse=True)
    own = operators.own_ns()[at]
    quickest = np.full(len(kinds), np.iinfo(np.int64).max)
    np.minimum.at(quickest, kind, own)
    spread = _spread(trace, kinds)[kind]
    return QuickestTimes(*(steps.count(step[at], np.where(which, quickest[kind], 0)) for which in (spread, ~spread)))


def _spread(trace: Trace, kinds: Int64) -> Bool:
    """Whether each kind (name and input sizes) is computed on several threads."""
    names, shapes = kinds >> 32, (kinds & 0xFFFFFFFF) - 1
    return np.array(
        [
            _is_spread(trace.strings[name], trace.strings[shape] if shape != NONE else "[]")
            for name, shape in zip(names.tolist(), shapes.tolist(), strict=True)
        ],
        dtype=np.bool_,
    )


@functools.lru_cache(maxsize=1 << 14)
def _is_spread(name: str, shapes: str) -> bool:
    try:
        largest = _largest(json.loads(shapes))
    except ValueError:
        return False
    product = classes.class_of_operator(name) in classes.PRODUCTS
    return largest >= (SMALL_PRODUCT if product else GRAIN)


def _largest(shapes: Any) -> int:
    """Elements of the largest tensor in recorded shapes, lists of tensors included."""
    if not isinstance(shapes, list) or not shapes:
        return 0
    if all(isinstance(size, int) for size in shapes):
        return math.prod(shapes)
    return max(_largest(inner) for inner in shapes)
