"""Nsight Compute: the command that profiles the kernels worth a look, and its CSV export read into the kernel table.

``ncu --import REPORT --csv`` writes, after lines of its own that begin with ``==``, one of two tables:

- ``--page raw``: a line per launch, a column per metric by its name, and a line of units under the heading;
- ``--page details`` (the default): a line for each launch and metric, by the metric's label (or its name, where single
  metrics were asked for).

Numbers may carry thousands separators, and a decimal comma where the machine's language has one.
"""

from __future__ import annotations

import csv
import math
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from perfscope.errors import PerfscopeError
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.results.notes import Note, note
from perfscope.results.tables import KernelRow, RooflineRow

_REPORT_MAGIC: Final = b"NVR\x00"
_EXPORT: Final = "ncu --import REPORT.ncu-rep --csv --page raw > kernels.csv"

_COMPUTE, _MEMORY, _DRAM, _OCCUPANCY, _DURATION = "compute", "memory", "dram", "occupancy", "duration"
_METRICS: Final = {
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": _COMPUTE,
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": _MEMORY,
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": _DRAM,
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": _DRAM,
    "sm__warps_active.avg.pct_of_peak_sustained_active": _OCCUPANCY,
    "gpu__time_duration.sum": _DURATION,
    # Labels of the details page: sections SpeedOfLight and Occupancy, ncu 2022 and later, then earlier ones.
    "Compute (SM) Throughput": _COMPUTE,
    "Compute (SM) [%]": _COMPUTE,
    "SOL SM": _COMPUTE,
    "Memory Throughput": _MEMORY,
    "Memory [%]": _MEMORY,
    "SOL Memory": _MEMORY,
    "DRAM Throughput": _DRAM,
    "Achieved Occupancy": _OCCUPANCY,
    "Duration": _DURATION,
}
_NS: Final = {
    "nsecond": 1.0, "ns": 1.0, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6, "second": 1e9, "s": 1e9,
}  # fmt: skip

BOUND: Final = 0.6
"""Share of a peak above which a kernel is bound by it, as Nsight Compute itself draws the line."""

KERNELS: Final = 5
"""Kernels in one command, the costliest."""
SKIPPED_STEPS: Final = 3
"""Steps that are skipped first: warm-up, autotuning, allocation."""
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
"""Words in template arguments that do not distinguish kernels."""


@dataclass(frozen=True)
class MeasuredKernel:
    """One kernel of an export, its launches averaged by their durations."""

    name: str
    roofline: RooflineRow


def read_export(path: Path) -> tuple[MeasuredKernel, ...]:
    """Every kernel of an export. Raises PerfscopeError naming the file and the remedy."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PerfscopeError(f"{path}: cannot be read ({error.strerror}); --ncu takes an export: {_EXPORT}") from error
    if content.startswith(_REPORT_MAGIC):
        raise PerfscopeError(f"{path}: is a report of Nsight Compute itself; export it: {_EXPORT}")
    lines = content.decode("utf-8-sig", errors="replace").splitlines()
    table = list(csv.reader(line for line in lines if not line.startswith("==")))
    heading = next((at for at, row in enumerate(table) if row[:1] == ["ID"] and "Kernel Name" in row), None)
    if heading is None:
        raise PerfscopeError(f"{path}: holds no table of kernels as Nsight Compute exports it; make one: {_EXPORT}")
    launches: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for launch, metric, unit, value in _values(table[heading], table[heading + 1 :]):
        known = _METRICS.get(metric)
        number = _number(value, unit, known) if known else None
        if known and number is not None:
            launches[launch].setdefault(known, number)
    if not any(set(values) - {_DURATION} for values in launches.values()):
        raise PerfscopeError(
            f"{path}: has none of the metrics of the sections SpeedOfLight and Occupancy; profile with "
            "--section SpeedOfLight --section Occupancy and export again"
        )
    by_name = grouped((name, values) for (_, name), values in launches.items())
    return tuple(MeasuredKernel(name, _roofline(instances)) for name, instances in by_name.items())


def with_roofline(
    rows: Sequence[KernelRow], measured: Iterable[MeasuredKernel]
) -> tuple[tuple[KernelRow, ...], tuple[str, ...]]:
    """(the rows with their measurements; the names of measured kernels that are in no row).

    Names are compared in one spelling (``canonical``); where only the function's name agrees, it must be
    the one kernel of that name on both sides.
    """
    spelt_measured = {canonical(kernel.name): kernel for kernel in measured}
    if not spelt_measured:
        return tuple(rows), ()
    spelt = {canonical(row.name): row.name for row in rows}
    pairs = {spelt[name]: kernel.roofline for name, kernel in spelt_measured.items() if name in spelt}
    rest = [name for name in spelt_measured if name not in spelt]
    free = [name for name in spelt if name not in spelt_measured]
    for name in list(rest):
        namesakes = [other for other in free if _function(other) == _function(name)]
        alone = sum(_function(other) == _function(name) for other in spelt_measured) == 1
        if len(namesakes) == 1 and alone:
            pairs[spelt[namesakes[0]]] = spelt_measured[name].roofline
            rest.remove(name)
    matched = tuple(replace(row, roofline=pairs[row.name]) if row.name in pairs else row for row in rows)
    return matched, tuple(spelt_measured[name].name for name in rest)


def unlisted_notes(names: Sequence[str]) -> Iterator[Note]:
    """A note of the measured kernels that are in no row, where there are any."""
    if names:
        more = [f"{len(names) - 3} more"] if len(names) > 3 else []
        yield note("Nsight Compute", "kernels_not_listed", names=[*(name[:120] for name in names[:3]), *more])


def canonical(name: str) -> str:
    """One spelling of a kernel's name, which every profiler spells differently.

    ::

        kineto  void at::native::copy<4, true>(float*, int)::{lambda(int)#1}
        ncu     void at::native::copy<(int)4, (bool)1>(float *, int)::[lambda(int) (instance 1)]

    Return type and parameters are left out, which ncu writes with placeholders (T1).
    """
    text = re.sub(r"\bvoid (?=[\w<(])", "", name.strip().removesuffix(" const"))
    text = text.replace("(anonymous namespace)", "unnamed").replace("<unnamed>", "unnamed")
    text = re.sub(r"\[lambda\(.*?\) \(instance (\d+)\)\]", r"{lambda#\1}", text)
    text = re.sub(r"\{lambda\([^{}]*\)#(\d+)\}", r"{lambda#\1}", text)
    text = _without_parameters(text)
    while (shorter := re.sub(r"\([^()]*\)(?=::\{lambda)", "", text)) != text:
        text = shorter
    text = re.sub(r"\([A-Za-z_][\w:<>, ]*\)(?=[-\w{])", "", text)
    text = re.sub(r"\btrue\b", "1", re.sub(r"\bfalse\b", "0", text))
    text = re.sub(r"\b(\d+)(?:u|l|ul|ull|ll)\b", r"\1", text, flags=re.IGNORECASE)
    return re.sub(r"\s+", "", text.replace("unsigned int", "unsigned"))


def _without_parameters(text: str) -> str:
    """``text`` without the parenthesis that ends it."""
    if not text.endswith(")"):
        return text
    depth = 0
    for at in range(len(text) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(text[at], 0)
        if depth == 0:
            return text[:at]
    return text


def _function(name: str) -> str:
    """The function's name alone, of a canonical one: ``at::native::copy<4>`` is ``copy``."""
    return name.partition("<")[0].rpartition("::")[2]


_Value = tuple[tuple[str, str], str, str, str]
"""(launch, metric, unit, value); a launch is its number and its kernel's name."""


def _values(heading: list[str], rows: list[list[str]]) -> Iterator[_Value]:
    at_name = heading.index("Kernel Name")
    if "Metric Name" in heading and "Metric Value" in heading:
        at_metric, at_value = heading.index("Metric Name"), heading.index("Metric Value")
        at_unit = heading.index("Metric Unit") if "Metric Unit" in heading else at_metric
        for row in rows:
            if len(row) > max(at_name, at_metric, at_unit, at_value):
                yield (row[0], row[at_name]), row[at_metric], row[at_unit], row[at_value]
        return
    units: list[str] = [""] * len(heading)
    for row in rows:
        if len(row) != len(heading):
            continue
        if row[0] == "":
            units = row
            continue
        for metric, unit, value in zip(heading, units, row, strict=True):
            yield (row[0], row[at_name]), metric, unit, value


def _number(text: str, unit: str, metric: str) -> float | None:
    """A share as 0..1, a duration in ns; None where it is none (``n/a``) or in another unit (bytes per second)."""
    value = _parse(text)
    if value is None:
        return None
    if metric == _DURATION:
        return value * _NS[unit] if unit in _NS else None
    if unit not in ("%", ""):
        return None
    # No share is above 1 by much: "91,75" was 91.75 then, not 9175.
    if value > 1000 and text.count(",") == 1 and "." not in text:
        value = float(text.replace(",", "."))
    return value / 100


def _parse(text: str) -> float | None:
    """A number with thousands separators of either kind; the separator that comes last and once is the decimal one."""
    cleaned = text.strip().replace("\u202f", "").replace("\u00a0", "").replace(" ", "")
    if "," in cleaned and "." in cleaned and cleaned.rindex(",") > cleaned.rindex("."):
        cleaned = cleaned.replace(".", "").replace(",", ".")
    elif cleaned.count(",") == 1 and not re.search(r",\d{3}(\.|$)", cleaned):
        cleaned = cleaned.replace(",", ".")
    elif cleaned.count(".") > 1:
        cleaned = cleaned.replace(".", "")
    try:
        value = float(cleaned.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _roofline(instances: list[dict[str, float]]) -> RooflineRow:
    by_time = all(values.get(_DURATION) for values in instances)

    def mean(metric: str) -> float | None:
        measured = [values for values in instances if metric in values]
        weights = [values[_DURATION] if by_time else 1.0 for values in measured]
        if not measured:
            return None
        return sum(values[metric] * weight for values, weight in zip(measured, weights, strict=True)) / sum(weights)

    compute, memory = mean(_COMPUTE), mean(_MEMORY)
    return RooflineRow(
        compute_share=compute,
        memory_share=memory,
        dram_share=mean(_DRAM),
        occupancy=mean(_OCCUPANCY),
        instances=len(instances),
        bound=_bound(compute, memory),
    )


def _bound(compute: float | None, memory: float | None) -> str:
    if compute is None or memory is None:
        return "unknown"
    if max(compute, memory) < BOUND:
        return "latency"
    return "compute" if compute >= memory else "memory"


def ncu_command(rows: Sequence[KernelRow], devices: Sequence[str], command: Sequence[str]) -> str | None:
    """Commands for a shell: profile, then export for ``perfscope analyze --ncu``. None without a kernel worth it.

    Kernels are selected by a regular expression that matches any spelling of their names. Their launches of
    ``SKIPPED_STEPS`` steps are skipped, those of one step profiled; then the program is ended.
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
    """A regular expression that matches a kernel's name in any spelling.

    The function's name, and behind it the longest name in its template arguments that is its own::

        void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(…)::{lambda()#1}, …>(int, …)
        vectorized_elementwise_kernel.*GeluCUDAKernelImpl
    """
    text = canonical(name)
    head, _, arguments = text.partition("<")
    function = head.rpartition("::")[2]
    inner = [word for word in re.findall(r"[A-Za-z_]\w{3,}", arguments) if word not in _COMMON]
    longest = max(inner, key=len, default="")
    return f"{re.escape(function)}.*{re.escape(longest)}" if longest else re.escape(function)
