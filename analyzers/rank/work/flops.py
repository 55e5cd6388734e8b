"""One rank's FLOPs per step, the types of its products, and the share of matrix time that the shapes cover."""

from __future__ import annotations

import numpy as np

from perfscope.analyzers.rank.attribution import Attribution
from perfscope.analyzers.rank.kernel_classes import PRODUCTS, class_of_kernel, precision
from perfscope.analyzers.rank.launches import DeviceWork
from perfscope.analyzers.rank.steps import Steps
from perfscope.analyzers.rank.work.tables import SINGLE_OR_TF32, RankFlops
from perfscope.trace.trace import NONE, WHOLE_GRAPH, Bool, Float64, Int64, Trace


def rank_flops(trace: Trace, work: DeviceWork, steps: Steps, attribution: Attribution) -> RankFlops:
    """Add up the counted calls of every step."""
    calls = attribution.calls
    step = steps.of_host_time(trace.start_ns[attribution.operators.row[calls.place]])
    hardware = calls.hardware.copy()
    served = np.zeros(len(calls), dtype=np.bool_)
    served[attribution.call[attribution.call != NONE]] = True
    if (work.launch != NONE).any():
        # Selective checkpointing repeats calls whose results it stored: they are recorded, but launch nothing.
        hardware[calls.recomputed & ~served] = 0.0
    else:
        hardware[_left_early(trace, attribution)] = 0.0
    model = np.where(calls.recomputed, 0.0, calls.model)
    index, weight, kind, types = _by_type(trace, work, attribution)
    inside = step[index] >= 0
    index, weight, kind = index[inside], weight[inside], kind[inside]
    cell = kind * len(steps) + step[index]

    def table(flops: Float64) -> Float64:
        sums = np.bincount(cell, weights=flops[index] * weight, minlength=len(types) * len(steps))
        # Shares of whole numbers add up to whole numbers, except for the last bits.
        return np.rint(sums).reshape(len(types), len(steps))

    matrix_ns, covered_ns = _coverage(trace, work, steps, attribution)
    return RankFlops(types, table(model), table(hardware), matrix_ns, covered_ns)


def _left_early(trace: Trace, attribution: Attribution) -> Bool:
    """Calls on the host in which a forward that runs again stopped: it has the last tensor that is needed once that
    call has saved its inputs. Such a call does not come to the operators that all calls of its name make elsewhere.
    """
    calls, parent = attribution.calls, attribution.operators.parent
    made = np.bincount(parent[parent >= 0], minlength=len(attribution.operators))[calls.place]
    name = trace.name[attribution.operators.row[calls.place]]
    fewest = np.full(len(trace.strings) + 1, np.iinfo(np.int64).max)
    np.minimum.at(fewest, name[~calls.recomputed], made[~calls.recomputed])
    known = np.where(fewest[name] < np.iinfo(np.int64).max, fewest[name], 0)
    left: Bool = calls.recomputed & (made < known)
    return left


def product_type(recorded: str | None, kernel: str) -> str | None:
    """The type in which a kernel multiplied, by its operator's recorded type and its own name."""
    by_name = precision(kernel)
    if recorded is not None and recorded != "float32":
        return recorded
    if by_name.tensor_cores is None and by_name.dtype in (None, "float32"):
        return SINGLE_OR_TF32 if recorded or by_name.dtype else None
    return by_name.dtype or recorded


def _by_type(
    trace: Trace, work: DeviceWork, attribution: Attribution
) -> tuple[Int64, Float64, Int64, tuple[str | None, ...]]:
    """Calls in parts of one type: (index of the call, its share, index of its type), and the types."""
    calls = attribution.calls
    kernels = np.flatnonzero(attribution.flops > 0)
    call = attribution.call[kernels]
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
    # A call without a kernel: on a host its own type is the type; on a device it may be TF32.
    single = SINGLE_OR_TF32 if len(work) else "float32"
    by_dtype = np.array(
        [numbers.setdefault(single if name == "float32" else name, len(numbers)) for name in calls.dtypes],
        dtype=np.int64,
    )
    alone = np.flatnonzero(np.bincount(call, minlength=len(calls)) == 0)
    return (
        np.concatenate((call, alone)),
        np.concatenate((attribution.flops[kernels] / calls.hardware[call], np.ones(len(alone)))),
        np.concatenate((by_pair[pair], by_dtype[calls.dtype[alone]])),
        tuple(numbers),
    )


def _coverage(trace: Trace, work: DeviceWork, steps: Steps, attribution: Attribution) -> tuple[Int64, Int64]:
    """(matrix time, its part under counted calls) of each step. What a graph computes whose kernels are not recorded
    may all be products, and none is counted.
    """
    if len(work):
        multiplies = trace.names_where(
            lambda name: class_of_kernel(name) in PRODUCTS or name.startswith(WHOLE_GRAPH), work.row
        )
        chosen = np.flatnonzero(multiplies & attribution.is_kernel & ~attribution.is_communication)
        step, covered = attribution.step[chosen], attribution.call[chosen] != NONE
        length = work.end_ns[chosen] - work.start_ns[chosen]
    else:
        place = np.concatenate((attribution.calls.place, attribution.calls.uncounted))
        covered = np.arange(len(place)) < len(attribution.calls)
        step = steps.of_host_time(trace.start_ns[attribution.operators.row[place]])
        length = attribution.operators.end[place] - attribution.operators.start[place]
    return steps.count(step, length), steps.count(step, length * covered)
