"""All tables of work of a job, and what Nsight Compute has to do with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.work.kernel_table import kernel_rows
from perfscope.analyzers.work.launch_table import launch_rows
from perfscope.analyzers.work.module_table import module_rows
from perfscope.analyzers.work.ncu import Measured, with_roofline
from perfscope.analyzers.work.ncu_command import ncu_command
from perfscope.analyzers.work.operator_table import operator_rows
from perfscope.hardware import peaks_of
from perfscope.summary import Note
from perfscope.summary_tables import KernelRow, LaunchRow, ModuleRow, OperatorRow


@dataclass(frozen=True)
class WorkTables:
    """The job's tables of work, as a ``Summary`` holds them."""

    kernels: tuple[KernelRow, ...]
    operators: tuple[OperatorRow, ...]
    modules: tuple[ModuleRow, ...]
    launches: tuple[LaunchRow, ...]
    ncu_command: str | None
    notes: tuple[Note, ...]


def work_tables(
    result: Comparison, devices: Sequence[str], command: Sequence[str], measured: Sequence[Measured]
) -> WorkTables:
    """Merge every rank's part. ``devices`` are the distinct names of the job's, ``command`` what was recorded."""
    peaks = peaks_of(devices[0]) if len(devices) == 1 else None
    kernels, strangers = with_roofline(kernel_rows(result, peaks), measured)
    return WorkTables(
        kernels=kernels,
        operators=operator_rows(result, peaks),
        modules=module_rows(result),
        launches=launch_rows(result),
        ncu_command=ncu_command(kernels, devices, command),
        notes=_notes(strangers),
    )


def _notes(strangers: tuple[str, ...]) -> tuple[Note, ...]:
    if not strangers:
        return ()
    named = ", ".join(name[:120] for name in strangers[:3])
    more = f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
    return (
        Note(
            about="Nsight Compute",
            text=f"Kernels measured by Nsight Compute that are not among the ones listed here, or not by one name: "
            f"{named}{more}.",
        ),
    )
