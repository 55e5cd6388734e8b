"""What the categories of Chrome traces mean, across the years and the vendors."""

from __future__ import annotations

from perfscope.trace import Category

_CATEGORIES = {
    "cpu_op": Category.CPU_OP,
    "operator": Category.CPU_OP,
    "user_annotation": Category.ANNOTATION,
    "python_function": Category.PYTHON,
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "memset": Category.MEMSET,
    "gpu_user_annotation": Category.GPU_ANNOTATION,
    "cuda_sync": Category.SYNC,
    "runtime": Category.RUNTIME,
    "mtia_ccp_events": Category.KERNEL,  # kineto: "MTIA on-device CCP events"
    "hpu_op": Category.RUNTIME,  # kineto: "HPU host side runtime event"
}
_RUNTIME_SUFFIXES = ("_runtime", "_driver")
"""``cuda_runtime``, ``cuda_driver``, ``xpu_runtime``, ``mtia_runtime``, ``privateuse1_driver`` …"""


def category_of(name: str) -> Category:
    """What a trace's ``cat`` stands for, in upper or lower case; OTHER where that is none of the categories."""
    known = name.casefold()
    if (category := _CATEGORIES.get(known)) is not None:
        return category
    if known.endswith(_RUNTIME_SUFFIXES) or known == "hip" or known.startswith("hip_"):
        return Category.RUNTIME
    return Category.OTHER
