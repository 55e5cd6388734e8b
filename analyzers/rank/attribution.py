"""Which operator launched each piece of device work, and how many FLOPs it computes."""

from __future__ import annotations

import numpy as np

from perfscope.analyzers.rank.collectives.communication import device_communication
from perfscope.analyzers.rank.flops.calls import FlopCalls, flop_calls
from perfscope.analyzers.rank.flops.recomputation import Stretches, stretches
from perfscope.analyzers.rank.kernel_classes import PRODUCTS, class_of_kernel
from perfscope.analyzers.rank.launches import DeviceWork
from perfscope.analyzers.rank.nesting import Nested
from perfscope.analyzers.rank.steps import Steps
from perfscope.frozen import dataclass
from perfscope.trace.custom_flops import CustomFlops
from perfscope.trace.trace import NONE, Bool, Category, Float64, Int64, Trace


@dataclass(frozen=True, eq=False)
class Attribution:
    """One rank's operators, when they run a forward again, the calls among them whose FLOPs are counted, and their
    device work.

    ``operator``, ``call``, ``flops``, ``step``, ``is_kernel`` and ``is_communication`` are parallel to ``DeviceWork``:
    index in ``operators`` of the innermost operator around the launch; index in ``calls`` of the counted call around
    it; its share of that call's FLOPs (including recomputation); index of the step in whose device window it begins.
    NONE where there is none.
    """

    operators: Nested
    recomputing: Stretches
    calls: FlopCalls
    operator: Int64
    call: Int64
    flops: Float64
    step: Int64
    is_kernel: Bool
    is_communication: Bool


def attribute(trace: Trace, work: DeviceWork, steps: Steps, custom: CustomFlops | None = None) -> Attribution:
    """Find the operator around every launch. Raises PerfscopeError where a formula of the user fails."""
    operators = Nested.of(trace, np.flatnonzero(trace.category == Category.CPU_OP))
    recomputing = stretches(trace, operators)
    calls = flop_calls(trace, operators, recomputing, custom)
    operator = operators.around(trace, work.launch)
    call = _call_around(operators, calls, operator)
    is_kernel = trace.category[work.row] == Category.KERNEL
    is_communication = device_communication(trace, work)
    return Attribution(
        operators=operators,
        recomputing=recomputing,
        calls=calls,
        operator=operator,
        call=call,
        flops=_shared(trace, work, calls, call, is_kernel & ~is_communication),
        step=steps.of_device_time(work.start_ns),
        is_kernel=is_kernel,
        is_communication=is_communication,
    )


def _call_around(operators: Nested, calls: FlopCalls, operator: Int64) -> Int64:
    """Index of the counted call that each operator is or is inside of; NONE where there is none."""
    call_at = np.full(len(operators) + 1, NONE, dtype=np.int64)
    call_at[calls.place] = np.arange(len(calls))
    around: Int64 = call_at[operators.nearest(operator, call_at[:-1] != NONE)]
    return around


def _shared(trace: Trace, work: DeviceWork, calls: FlopCalls, call: Int64, is_computing: Bool) -> Float64:
    """Each kernel's share of its call's FLOPs, by its share of the time of the call's kernels that multiply.

    Names show which kernels multiply. Where none does, all kernels of the call share: casts and reductions beside a
    product then count as part of it.
    """
    of_call = np.flatnonzero(is_computing & (call != NONE))
    multiplies = trace.names_where(lambda name: class_of_kernel(name) in PRODUCTS, work.row[of_call])
    has_multiplying = np.zeros(len(calls), dtype=np.bool_)
    has_multiplying[call[of_call[multiplies]]] = True
    sharing = of_call[multiplies | ~has_multiplying[call[of_call]]]
    # A kernel of 0 ns (the clock's resolution) still has its share.
    length = np.maximum(work.end_ns[sharing] - work.start_ns[sharing], 1).astype(np.float64)
    total = np.bincount(call[sharing], weights=length, minlength=len(calls))
    flops = np.zeros(len(work), dtype=np.float64)
    flops[sharing] = calls.hardware[call[sharing]] * (length / total[call[sharing]])
    return flops
