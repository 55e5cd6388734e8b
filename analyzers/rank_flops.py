"""One rank's FLOPs per step, the type its matrix products ran in, and how much of them the shapes cover."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.communication import dtype_of
from perfscope.analyzers.flops import FORMULAS, flops_of
from perfscope.analyzers.launches import DeviceWork
from perfscope.analyzers.steps import Steps
from perfscope.trace import NONE, Bool, Category, Int64, Trace

_MATRIX_KERNEL: Final = re.compile(
    r"gemm|cutlass|cublas|xmma|^Cijk_|fmha|flash|attention|conv.*(fprop|wgrad|dgrad|winograd)|winograd|nvjet|wgmma|MT\d+x",
    re.IGNORECASE,
)
"""Kernels that multiply matrices, by name: cuBLAS, cuBLASLt (nvjet), CUTLASS, cuDNN, rocBLAS (Cijk, MT), attention."""

_TF32_KERNEL: Final = re.compile(r"tf32|s1688gemm_(?!f16|bf16)|_s1688(?!f16|bf16)", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class RankFlops:
    """FLOPs of one rank in each step (arrays like ``Steps``), and what they rest on.

    ``coverage`` is the share of matrix-kernel time (operator time on a rank without device work) whose operators have
    usable shapes; None where the rank ran no matrix product that could be recognised. ``dtype`` is torch's name of the
    type in which most FLOPs ran (``tf32`` where kernels say so); None when not recorded.
    """

    model: Int64
    hardware: Int64
    coverage: float | None
    dtype: str | None


def rank_flops(trace: Trace, work: DeviceWork, steps: Steps) -> RankFlops:
    """Count every recorded matrix operator of every step."""
    rows = np.flatnonzero((trace.category == Category.CPU_OP) & trace.names_where(FORMULAS.__contains__))
    model, hardware = np.zeros(len(steps), dtype=np.int64), np.zeros(len(steps), dtype=np.int64)
    by_type: dict[str, float] = {}
    counted = np.zeros(len(rows), dtype=np.bool_)
    known: dict[tuple[int, int, int, int], tuple[float, float, str] | None] = {}
    step = steps.of_host_time(trace.start_ns[rows])
    for index, row in enumerate(rows):
        key = (int(trace.name[row]), int(trace.shapes[row]), int(trace.types[row]), int(trace.inputs[row]))
        if key not in known:
            known[key] = _one_call(trace, *key)
        value = known[key]
        if value is None:
            continue
        counted[index] = True
        if step[index] >= 0:
            model[step[index]] += int(value[0])
            hardware[step[index]] += int(value[1])
            by_type[value[2]] = by_type.get(value[2], 0.0) + value[0]
    coverage = _coverage(trace, work, rows, counted)
    dtype = dtype_of(max(by_type, key=lambda name: by_type[name])) if by_type else None
    if dtype == "float32" and _runs_tf32(trace, work):
        dtype = "tf32"
    return RankFlops(model, hardware, coverage, dtype)


def _one_call(trace: Trace, name: int, shapes: int, types: int, inputs: int) -> tuple[float, float, str] | None:
    def text(index: int) -> str:
        return trace.strings[index] if index != NONE else ""

    found = flops_of(trace.strings[name], text(shapes), text(types), text(inputs))
    return None if found is None else (found[0].model, found[0].hardware, found[1])


def _coverage(trace: Trace, work: DeviceWork, operators: Int64, counted: Bool) -> float | None:
    """Share of matrix time under counted operators."""
    if len(work) == 0:
        total = int(trace.duration_ns[operators].sum())
        return int(trace.duration_ns[operators[counted]].sum()) / total if total else None
    is_matrix = trace.names_where(lambda name: _MATRIX_KERNEL.search(name) is not None)[work.row]
    is_matrix &= trace.category[work.row] == Category.KERNEL
    time = work.end_ns - work.start_ns
    total = int(time[is_matrix].sum())
    if total == 0:
        return None
    launched = np.flatnonzero(is_matrix & (work.launch != NONE))
    under = _inside(trace, operators[counted], work.launch[launched])
    return int(time[launched[under]].sum()) / total


def _inside(trace: Trace, operators: Int64, calls: Int64) -> Bool:
    """For each runtime call: does it start inside one of ``operators`` (none nested in another) on its own thread?"""
    inside = np.zeros(len(calls), dtype=np.bool_)
    for thread in np.unique(trace.thread[operators]):
        mine = operators[trace.thread[operators] == thread]
        here = np.flatnonzero(trace.thread[calls] == thread)
        position = np.searchsorted(trace.start_ns[mine], trace.start_ns[calls[here]], side="right") - 1
        found = position >= 0
        inside[here[found]] = trace.start_ns[calls[here[found]]] < trace.end_ns[mine[position[found]]]
    return inside


def _runs_tf32(trace: Trace, work: DeviceWork) -> bool:
    """Do most matrix kernels (by time) say in their names that they use TF32?"""
    is_matrix = trace.names_where(lambda name: _MATRIX_KERNEL.search(name) is not None)[work.row]
    is_tf32 = trace.names_where(lambda name: _TF32_KERNEL.search(name) is not None)[work.row]
    time = work.end_ns - work.start_ns
    return bool(2 * time[is_matrix & is_tf32].sum() > time[is_matrix].sum() > 0)
