"""Kernel names, shortened to what distinguishes them, without the C++ around it."""

from __future__ import annotations

import re
from typing import Final

LONGEST: Final = 64

_DULL: Final = frozenset(
    (
        "at", "native", "detail", "void", "float", "double", "int", "long", "unsigned", "char", "bool", "const", "std",
        "c10", "cutlass", "array", "Array", "lambda", "operator", "anonymous", "namespace", "TensorIteratorBase",
        "gpu_kernel_impl", "gpu_kernel_impl_nocast", "Params", "Half", "BFloat16", "OffsetCalculator", "BinaryFunctor",
        "AUnaryFunctor", "BUnaryFunctor", "binary_internal", "GenericPackedTensorAccessor", "DefaultPtrTraits",
        "decltype", "nullptr", "true", "false", "ReduceOp", "OpaqueType",
    )
)  # fmt: skip
_WRAPPERS: Final = frozenset(("Kernel", "Kernel2", "device_kernel"))
"""Functions that only call what their first template argument names."""


def short_name(name: str) -> str:
    """A kernel's name in at most ``LONGEST`` characters.

    ::

        void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, …>(int, …)
        vectorized_elementwise_kernel<CUDAFunctor_add>

        void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x4_nn_align4>(…)
        cutlass_80_tensorop_s1688gemm_128x128_16x4_nn_align4

        _ZN2ck16tensor_operation6device12_GLOBAL__N_139kernel_grouped_conv_fwd_xdl_cshuffle_v3I…
        kernel_grouped_conv_fwd_xdl_cshuffle_v3
    """
    return _cut(_simplified(name) or name)


def _simplified(name: str) -> str:
    text = _demangled(name).removeprefix("void ").replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    # Memcpy HtoD (Pageable -> Device) keeps its parentheses: no C++ name has a space before one.
    text = re.sub(r"^([\w:]+)\(.*\)$", r"\1", text)
    head, bracket, rest = text.partition("<")
    if not bracket:
        return head.rpartition("::")[2]
    arguments = _until_closed(rest)
    function = head.rpartition("::")[2]
    words = [word for word in re.findall(r"[A-Za-z_]\w{3,}", arguments) if word not in _DULL]
    argument = words[0] if function in _WRAPPERS and words else max(words[:6], key=len, default="")
    if function in _WRAPPERS and argument:
        return argument
    return f"{function}<{argument}>" if argument else function


def _until_closed(text: str) -> str:
    """What stands before the bracket that closes one opened before ``text``."""
    depth = 1
    for bracket in re.finditer("[<>]", text):
        depth += 1 if bracket[0] == "<" else -1
        if depth == 0:
            return text[: bracket.start()]
    return text


def _demangled(name: str) -> str:
    """The last name in a mangled one (``_ZN2ck4gemmI…`` is ``gemm``): the function's own, before its arguments."""
    if not name.startswith("_ZN"):
        return name
    at, last = 3, ""
    while (match := re.match(r"(\d{1,4})", name[at:])) is not None:
        length = int(match[1])
        at += len(match[1])
        last, at = name[at : at + length], at + length
    return last or name


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
