"""Which operator each piece of device work serves, and which FLOPs it does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfscope.analyzers.collectives.communication import device_communication
from perfscope.analyzers.flops.calls import FlopCalls, flop_calls
from perfscope.analyzers.launches import DeviceWork
from perfscope.analyzers.nesting import Nested
from perfscope.analyzers.steps import Steps
from perfscope.analyzers.work.kernel_classes import PRODUCTS, class_of_kernel
from perfscope.custom_flops import CustomFlops
from perfscope.trace import NONE, Bool, Category, Float64, Int64, Trace


@dataclass(frozen=True, eq=False)
class Attribution:
    """One rank's operators, the calls among them whose FLOPs are counted, and what each piece of device work has to do
    with them.

    ``operator``, ``call``, ``flops``, ``step``, ``is_kernel`` and ``is_communication`` are parallel to ``DeviceWork``:
    place of the innermost operator around the launch; index of the counted call around it; its share of that call's
    FLOPs (as computed, recomputation included); index of the step in whose window it begins. NONE where there is none.
    """

    operators: Nested
    calls: FlopCalls
    operator: Int64
    call: Int64
    flops: Float64
    step: Int64
    is_kernel: Bool
    is_communication: Bool


def attribute(trace: Trace, work: DeviceWork, steps: Steps, custom: CustomFlops | None = None) -> Attribution:
    """Look for the operator around every launch. Raises PerfscopeError where a formula of the user's fails."""
    operators = Nested.of(trace, np.flatnonzero(trace.category == Category.CPU_OP))
    calls = flop_calls(trace, operators, custom)
    operator = np.full(len(work), NONE, dtype=np.int64)
    launched = np.flatnonzero(work.launch != NONE)
    rows = work.launch[launched]
    operator[launched] = operators.innermost(trace.thread[rows], trace.start_ns[rows])
    call = _call_around(operators, calls, operator)
    is_kernel = trace.category[work.row] == Category.KERNEL
    is_communication = device_communication(trace, work)
    return Attribution(
        operators=operators,
        calls=calls,
        operator=operator,
        call=call,
        flops=_shared(trace, work, calls, call, is_kernel & ~is_communication),
        step=steps.of_device_time(work.start_ns),
        is_kernel=is_kernel,
        is_communication=is_communication,
    )


def _call_around(operators: Nested, calls: FlopCalls, operator: Int64) -> Int64:
    """Index of the counted call that each operator is or lies in; NONE without."""
    call_at = np.full(len(operators) + 1, NONE, dtype=np.int64)
    call_at[calls.place] = np.arange(len(calls))
    around = operator.copy()
    found: Int64 = call_at[around]
    pending = np.flatnonzero((around != NONE) & (found == NONE))
    while len(pending):
        around[pending] = operators.parent[around[pending]]
        found[pending] = call_at[around[pending]]
        pending = pending[(around[pending] != NONE) & (found[pending] == NONE)]
    return found


def _shared(trace: Trace, work: DeviceWork, calls: FlopCalls, call: Int64, is_computing: Bool) -> Float64:
    """Each kernel's share of its call's FLOPs, by time among those of the call that multiply by their names.

    Where none of a call's kernels says so, all share: casts and reductions beside a product then count as part of it.
    """
    of_call = np.flatnonzero(is_computing & (call != NONE))
    multiplies = trace.names_where(lambda name: class_of_kernel(name) in PRODUCTS)[work.row[of_call]]
    has_multiplying = np.zeros(len(calls), dtype=np.bool_)
    has_multiplying[call[of_call[multiplies]]] = True
    sharing = of_call[multiplies | ~has_multiplying[call[of_call]]]
    # A kernel of 0 ns (the clock's tick) still did its part.
    length = np.maximum(work.end_ns[sharing] - work.start_ns[sharing], 1).astype(np.float64)
    total = np.bincount(call[sharing], weights=length, minlength=len(calls))
    flops = np.zeros(len(work), dtype=np.float64)
    flops[sharing] = calls.hardware[call[sharing]] * (length / total[call[sharing]])
    return flops
