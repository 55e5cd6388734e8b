"""One rank's FLOPs per step, the types its products ran in, and how much of them the shapes cover."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.attribution import Attribution
from perfscope.analyzers.launches import DeviceWork
from perfscope.analyzers.steps import Steps
from perfscope.analyzers.work.kernel_classes import PRODUCTS, class_of_kernel, precision
from perfscope.trace import NONE, Float64, Int64, Trace

SINGLE_OR_TF32: Final = "float32 or tf32"
"""Type of products of single precision in kernels whose names do not say whether they used TF32."""


@dataclass(frozen=True, eq=False)
class RankFlops:
    """FLOPs of one rank in each step and what they rest on. Arrays have one column a step.

    ``model`` leaves out what was computed before (activation checkpointing, attention's scores in its backward),
    ``hardware`` counts it. Both have one line for each of ``types``: torch's name of the type in which the products
    ran, ``tf32``, ``SINGLE_OR_TF32``, or None where nothing says.
    """

    types: tuple[str | None, ...]
    model: Float64
    hardware: Float64
    matrix_ns: Int64
    """Time of kernels that multiply, by their names (of operators that do, on a rank without device work)."""
    covered_ns: Int64
    """The part of it whose operators have usable shapes."""

    def coverage(self, steps: Int64) -> float | None:
        """Share of matrix time in these steps whose FLOPs are counted; None where there was none."""
        total = int(self.matrix_ns[steps].sum())
        return int(self.covered_ns[steps].sum()) / total if total else None


def rank_flops(trace: Trace, work: DeviceWork, steps: Steps, found: Attribution) -> RankFlops:
    """Add up the counted calls of every step."""
    calls = found.calls
    step = steps.of_host_time(trace.start_ns[found.operators.row[calls.place]])
    hardware = calls.hardware.copy()
    served = np.zeros(len(calls), dtype=np.bool_)
    served[found.call[found.call != NONE]] = True
    if (work.launch != NONE).any():
        # Selective checkpointing replays the calls whose results it kept: recorded, but nothing is computed.
        hardware[calls.recomputed & ~served] = 0.0
    model = np.where(calls.recomputed, 0.0, calls.model)
    index, weight, kind, types = _by_type(trace, work, found)
    inside = step[index] >= 0
    index, weight, kind = index[inside], weight[inside], kind[inside]
    cell = kind * len(steps) + step[index]

    def table(flops: Float64) -> Float64:
        sums = np.bincount(cell, weights=flops[index] * weight, minlength=len(types) * len(steps))
        # Shares of whole numbers add up to whole numbers, but for the last bits.
        return np.rint(sums).reshape(len(types), len(steps))

    matrix_ns, covered_ns = _coverage(trace, work, steps, found)
    return RankFlops(types, table(model), table(hardware), matrix_ns, covered_ns)


def product_type(recorded: str | None, kernel: str) -> str | None:
    """The type in which a kernel multiplied, by its operator's recorded type and its own name."""
    by_name = precision(kernel)
    if recorded is not None and recorded != "float32":
        return recorded
    if by_name.tensor_cores is None and by_name.dtype in (None, "float32"):
        return SINGLE_OR_TF32 if recorded or by_name.dtype else None
    return by_name.dtype or recorded


def _by_type(
    trace: Trace, work: DeviceWork, found: Attribution
) -> tuple[Int64, Float64, Int64, tuple[str | None, ...]]:
    """Calls in parts of one type: (index of the call, share of it, index of its type), and the types."""
    calls = found.calls
    kernels = np.flatnonzero(found.flops > 0)
    call = found.call[kernels]
    names = max(len(trace.strings), 1)
    pairs, pair = np.unique(calls.dtype[call] * names + trace.name[work.row[kernels]], return_inverse=True)
    numbers: dict[str | None, int] = {}
    by_pair = np.array(
        [
            numbers.setdefault(product_type(calls.dtypes[one // names], trace.strings[one % names]), len(numbers))
            for one in pairs.tolist()
        ],
        dtype=np.int64,
    )
    # A call without a kernel: on a host it ran in its own type; on a device nothing says whether that was TF32.
    hidden = SINGLE_OR_TF32 if len(work) else "float32"
    by_dtype = np.array(
        [numbers.setdefault(hidden if name == "float32" else name, len(numbers)) for name in calls.dtypes],
        dtype=np.int64,
    )
    alone = np.flatnonzero(np.bincount(call, minlength=len(calls)) == 0)
    return (
        np.concatenate((call, alone)),
        np.concatenate((found.flops[kernels] / calls.hardware[call], np.ones(len(alone)))),
        np.concatenate((by_pair[pair], by_dtype[calls.dtype[alone]])),
        tuple(numbers),
    )


def _coverage(trace: Trace, work: DeviceWork, steps: Steps, found: Attribution) -> tuple[Int64, Int64]:
    """(matrix time, its part under counted calls) of each step."""
    if len(work):
        multiplies = trace.names_where(lambda name: class_of_kernel(name) in PRODUCTS)[work.row]
        chosen = np.flatnonzero(multiplies & found.is_kernel & ~found.is_communication & (found.step >= 0))
        step, covered = found.step[chosen], found.call[chosen] != NONE
        length = work.end_ns[chosen] - work.start_ns[chosen]
    else:
        place = np.concatenate((found.calls.place, found.calls.uncounted))
        covered = np.arange(len(place)) < len(found.calls)
        step = steps.of_host_time(trace.start_ns[found.operators.row[place]])
        length = found.operators.end[place] - found.operators.start[place]
        step, covered, length = step[step >= 0], covered[step >= 0], length[step >= 0]
    sums = [np.bincount(step, weights=part, minlength=len(steps)) for part in (length, length * covered)]
    return sums[0].astype(np.int64), sums[1].astype(np.int64)
