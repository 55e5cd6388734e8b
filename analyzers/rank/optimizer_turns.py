"""Optimizers that take turns in one training step, as a GAN's do for its two networks: told by what runs before each.

Example: steps of Adam follow one another, all of one name. Before every other one the discriminator's 300 operators ran
and the generator's 80 forward ones, before the others the 300 of the generator and its loss: two make a training step.
Where every other step has something more, such as an evaluation, each is a training step.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.trace.trace import Category, Float64, Int64, Trace

_MOST: Final = 8
"""Optimizer steps in one training step, at most: five of a critic and one of a generator are usual."""
_SAME: Final = 0.05
"""Share of the operators in which the same turn of two training steps differs, at most."""
_DIFFERS: Final = 0.03
"""Share of the operators that each of two turns has and the other has not, at least."""


def turns_of_optimizers(trace: Trace, stepped_ns: Int64) -> int:
    """Optimizer steps, which end at ``stepped_ns``, in one training step; 1 where each does what the others do."""
    called = _called(trace, stepped_ns)[1:]  # what came before the first may be cut
    total = float(called.sum(axis=1).mean()) if len(called) else 0.0
    for turns in range(2, min(_MOST, len(called) // 2) + 1):
        differs = np.abs(called[turns:] - called[:-turns]).sum(axis=1)
        if (differs <= _SAME * total).all():
            more = np.diff(called, axis=0)
            both = np.minimum(np.maximum(more, 0).sum(axis=1), np.maximum(-more, 0).sum(axis=1))
            return turns if both.max() >= _DIFFERS * total else 1
    return 1


def _called(trace: Trace, stepped_ns: Int64) -> Float64:
    """How often each operator (columns) is called before each optimizer step's end (lines)."""
    rows = trace.rows(Category.CPU_OP)
    step = np.searchsorted(stepped_ns, trace.start_ns[rows], side="right")
    kept = step < len(stepped_ns)
    _, name = np.unique(trace.name[rows[kept]], return_inverse=True)
    shape = len(stepped_ns), int(name.max(initial=-1)) + 1
    return np.bincount(step[kept] * shape[1] + name, minlength=shape[0] * shape[1]).reshape(shape).astype(np.float64)
