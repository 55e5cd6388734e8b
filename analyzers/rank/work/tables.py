"""The tables of one rank as values: kernels, operators, modules, launches, host synchronizations, FLOPs.

All are sums per name and step: small enough to travel between processes, and the used steps of the job can be chosen
later, when the ranks are compared. Arrays ``[lines, steps]`` have a line per name and a column per step.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np

from perfscope.analyzers.rank import kernel_classes as classes
from perfscope.frozen import dataclass
from perfscope.trace.trace import Float64, Int64

CATEGORIES: Final = ("compute", "communication", "copy", "memset")
OTHER_KERNELS: Final = "(other kernels)"
OTHER_OPERATORS: Final = "(other operators)"
OTHER_RANGES: Final = "(other ranges)"
"""Names of the lines that add up everything that is not among the costliest."""

CLASSES: Final = (
    classes.MATRIX, classes.ATTENTION, classes.CONVOLUTION, classes.NORMALISATION, classes.ELEMENTWISE,
    classes.REDUCTION, classes.OPTIMIZER, classes.EMBEDDING, classes.COMMUNICATION, classes.COPY, classes.MEMSET,
    classes.OTHER,
)  # fmt: skip
SHORT_NS: Final = 10_000
"""A kernel shorter than this takes hardly longer than the call that launches it."""
SINGLE_OR_TF32: Final = "float32 or tf32"
"""Type of single-precision products in kernels whose names do not show whether they use TF32."""


class _NamedLines:
    """A table with names. Unpickled, each name is held once in this process: the ranks of a job have the same names."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        for field in {"names", "calls", "operators", "ranges", "graphs", "annotations"} & state.keys():
            state[field] = tuple(map(sys.intern, state[field]))
        self.__dict__.update(state)


@dataclass(frozen=True, eq=False)
class KernelTimes(_NamedLines):
    """Device work of one rank: one line per name and category, the costliest first; sums are ``[lines, steps]``.

    ``operator`` is the innermost operator that launches most of it, by time; ``operator_class`` and ``dtype`` (as in
    ``RankFlops``) likewise. ``flops`` are the FLOPs of the calls that could be counted, ``flops_ns`` the time in those;
    both only for the lines ``flops_line``, because few kernels multiply.
    """

    names: tuple[str, ...]
    category: tuple[str, ...]
    operator: tuple[str | None, ...]
    operator_class: tuple[str, ...]
    dtype: tuple[str | None, ...]
    count: Int64
    total_ns: Int64
    shortest_ns: Int64
    longest_ns: Int64
    flops_line: Int64
    flops: Float64
    flops_ns: Int64


@dataclass(frozen=True, eq=False)
class OperatorTimes(_NamedLines):
    """Operators of one rank: one line per name, the costliest first; sums are ``[lines, steps]``.

    Calls and host time count in the step in whose host window the call begins; device work in the step in whose device
    window it begins, at the innermost operator around its launch. A call that an operator passes on to an overload of
    its own name is one. ``flops`` and ``flops_ns`` exist for the lines ``flops_line`` only: with a device, those of the
    kernels; without one, those of the calls and their whole length.
    """

    names: tuple[str, ...]
    operator_class: tuple[str, ...]
    dtype: tuple[str | None, ...]
    count: Int64
    host_ns: Int64
    device_ns: Int64
    kernels: Int64
    flops_line: Int64
    flops: Float64
    flops_ns: Int64
    called_by: tuple[str, ...] = ()
    """Of the first lines: the outermost operator around most of its time; empty where there is none."""
    function: tuple[str, ...] = ()
    """And the script's innermost Python function around it; empty, and no line at all, where stacks do not tell."""


@dataclass(frozen=True, eq=False)
class ModuleTimes(_NamedLines):
    """Named ranges of one rank: one line per name, the costliest first; sums are ``[lines, steps]``.

    A range counts in the step in whose host window it begins. ``device_ns`` is, per name and step, the union of the
    device work launched inside its ranges on the same thread. It does not include a module's backward, because autograd
    does not call modules.
    """

    names: tuple[str, ...]
    depth: Int64
    """Per line: the number of ranges around it, for most of its time."""
    count: Int64
    host_ns: Int64
    device_ns: Int64
    kernels: Int64


@dataclass(frozen=True, eq=False)
class LaunchTimes:
    """Launches of one rank; one entry per step, NaN where a step has none.

    ``delay_median_ns`` and ``delay_p95_ns``: from a call's end to the start of its (first) work, 0 where that starts
    before the call returns. ``depth_median``: pieces of work launched and not yet begun, the median over time.
    ``starved``: calls at whose start all work launched before had ended. ``short``: kernels below ``SHORT_NS``.
    ``unlisted_graphs``: launches of CUDA graphs of which no node is recorded.
    """

    calls: Int64
    call_ns: Int64
    delay_median_ns: Float64
    delay_p95_ns: Float64
    depth_median: Float64
    starved: Int64
    kernels: Int64
    short: Int64
    unlisted_graphs: Int64


@dataclass(frozen=True, eq=False)
class SyncTimes(_NamedLines):
    """Host synchronizations of one rank that cause idle time; sums are ``[lines, steps]``.

    ``idle_ns`` is what the time breakdown calls synchronization. ``delayed_ns`` is all idle time that would be gone had
    the host not waited: also where it paused after the wait, or was in the loader.

    There is one line per place in the program: the call (``calls``), the operator around it (``operators``) and the
    named range around it (``ranges``); the latter two are empty where there is none. What the training loop reads right
    after a collective that it calls between the optimizer's step and the next forward has lines of its own
    (``of_loop``).
    """

    calls: tuple[str, ...]
    operators: tuple[str, ...]
    ranges: tuple[str, ...]
    of_loop: tuple[bool, ...]
    count: Int64
    idle_ns: Int64
    delayed_ns: Int64


@dataclass(frozen=True, eq=False)
class CompiledTimes(_NamedLines):
    """Calls in the code of one rank's compiled graphs; sums are ``[lines, steps]``.

    A line is one call: the key of its graph (``graphs``), its name (``calls``; empty: the code between its calls, which
    is where generated kernels run that no event shows) and its ``number`` among those of this name in one run of the
    graph. ``order`` is a kernel's place among those that the code launches itself, as a CUDA graph's; NONE for others.
    Lines of device work name the kernel (``names``; empty in the lines of the host, which hold ``count`` and
    ``host_ns``), and where a CUDA graph launches it ``nodes`` (``GraphNodes.node``; NONE elsewhere) with what the trace
    has of the node's annotation (``annotations``, JSON text; empty where nothing). Kernels of CUDA graphs that run
    outside of compiled code are lines too, whose ``graphs`` are empty.
    """

    graphs: tuple[str, ...]
    calls: tuple[str, ...]
    number: Int64
    order: Int64
    names: tuple[str, ...]
    nodes: Int64
    annotations: tuple[str, ...]
    count: Int64
    host_ns: Int64
    kernels: Int64
    device_ns: Int64

    @classmethod
    def none(cls, steps: int) -> CompiledTimes:
        """Nothing was compiled."""
        empty = np.empty((0, steps), dtype=np.int64)
        none = np.empty(0, dtype=np.int64)
        return cls((), (), none, none, (), none, (), empty, empty, empty, empty)


@dataclass(frozen=True, eq=False)
class QuickestTimes:
    """Time of one rank's operators if each call took as long as the quickest of its name and input sizes; ns per step.

    ``spread_ns``: operators that torch spreads over its threads; ``alone_ns``: those that one thread computes. Both
    without operators that load a batch. Zero where a device does the work, or sizes are not recorded.
    """

    spread_ns: Int64
    alone_ns: Int64


@dataclass(frozen=True, eq=False)
class GapTimes(_NamedLines):
    """What one rank's training threads do between operators, where they neither load data nor wait for other ranks:
    Python, for the most part. One line per phase of the loop (``loop_phases.split``); sums are ``[lines, steps]``.

    ``count``: operators that begin in the phase. No line where a device does the work.
    """

    names: tuple[str, ...]
    count: Int64
    host_ns: Int64


@dataclass(frozen=True, eq=False)
class RankFlops:
    """FLOPs of one rank, and how much of its matrix time they cover. Arrays have one column per step.

    ``hardware`` are the FLOPs computed; ``model`` leaves out recomputation (activation checkpointing, attention's
    scores in its backward). Both have one line per type of the products in ``types``: torch's name, ``tf32``,
    ``SINGLE_OR_TF32``, or None where not known.
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


@dataclass(frozen=True, eq=False)
class RankTables:
    """All tables of one rank."""

    kernels: KernelTimes
    operators: OperatorTimes
    modules: ModuleTimes
    launches: LaunchTimes
    syncs: SyncTimes
    quickest: QuickestTimes
    gaps: GapTimes
    compiled: CompiledTimes
