"""The command with which Nsight Compute profiles just the kernels that are worth a look."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Final

from perfscope.analyzers.work.ncu import canonical
from perfscope.summary_tables import KernelRow

KERNELS: Final = 5
"""Kernels in one command, the costliest."""
SKIPPED_STEPS: Final = 3
"""Steps that are let pass first: warm-up, autotuning, allocation."""
MOST_LAUNCHES: Final = 1000
"""Launches profiled at most; each is replayed several times."""
REPORT: Final = "perfscope-kernels"
EXPORTED: Final = "perfscope-kernels.csv"

_NVIDIA: Final = re.compile(r"NVIDIA|Tesla|GeForce|Quadro|\b(A100|H100|H200|V100)\b")
_COMMON: Final = frozenset(
    (
        "void", "float", "double", "unsigned", "const", "char", "bool", "long", "native", "detail", "cuda", "unnamed",
        "array", "Array", "cutlass", "kernel", "Params", "operator", "lambda", "TensorIteratorBase", "gpu_kernel_impl",
        "gpu_kernel_impl_nocast", "BinaryFunctor", "AUnaryFunctor", "BUnaryFunctor", "OffsetCalculator",
        "binary_internal", "GenericPackedTensorAccessor", "DefaultPtrTraits",
    )
)  # fmt: skip
"""Words in template arguments that tell no kernel from another."""


def ncu_command(rows: Sequence[KernelRow], devices: Sequence[str], command: Sequence[str]) -> str | None:
    """Commands for a shell: profile, then export for ``perfscope analyze --ncu``. None without a kernel worth it.

    Kernels are picked out by a regular expression that finds them in any spelling of their names. So many launches are
    skipped as they have in ``SKIPPED_STEPS``, and those of one step are profiled; then the program is ended.
    """
    # A mangled name cannot be found by its words.
    wanted = [row for row in rows if row.worth_a_look and row.category == "compute" and row.name[:2] != "_Z"][:KERNELS]
    if not wanted or not devices or not all(_NVIDIA.search(device) for device in devices):
        return None
    pattern = "|".join(dict.fromkeys(name_pattern(row.name) for row in wanted))
    per_step = sum(row.count_per_step for row in rows if re.search(pattern, row.name))
    count = min(max(round(per_step), 1), MOST_LAUNCHES)
    program = shlex.join(command) if command else "YOUR COMMAND"
    return "\n".join(
        (
            "ncu --target-processes all --kernel-name-base demangled \\",
            f"  --kernel-name {shlex.quote(f'regex:{pattern}')} \\",
            f"  --launch-skip {round(per_step * SKIPPED_STEPS)} --launch-count {count} --kill yes \\",
            f"  --section SpeedOfLight --section Occupancy --force-overwrite --export {REPORT} \\",
            f"  {program}",
            f"ncu --import {REPORT}.ncu-rep --csv --page raw > {EXPORTED}",
        )
    )


def name_pattern(name: str) -> str:
    """A regular expression that is found in a kernel's name however it is spelt.

    The function's name, and behind it the longest name in its template arguments that is its own::

        void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(…)::{lambda()#1}, …>(int, …)
        vectorized_elementwise_kernel.*GeluCUDAKernelImpl
    """
    text = canonical(name)
    head, _, arguments = text.partition("<")
    function = head.rpartition("::")[2]
    inner = [word for word in re.findall(r"[A-Za-z_]\w{3,}", arguments) if word not in _COMMON]
    telling = max(inner, key=len, default="")
    return f"{re.escape(function)}.*{re.escape(telling)}" if telling else re.escape(function)
