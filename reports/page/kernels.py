"""The work on the devices: kernels, operators, named ranges, launches, and how to measure kernels worth a look."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from perfscope.reports import tables
from perfscope.reports.kernel_names import short_name
from perfscope.reports.page.compiled import compiled_module_table, compiled_table, origin_columns
from perfscope.reports.tables import Cell, Filled, HtmlTable, absent
from perfscope.results.summary import Summary
from perfscope.results.tables import KernelRow, LaunchRow, ModuleRow, OperatorRow
from perfscope.text import count_per_step, duration, factor, flop, percent, plural, significant

SHOWN: Final = 20
"""Rows of a table on the page; the machine-readable result has more."""

_LONGEST_NAME: Final = 600
"""Characters of a full name on the page."""
_INSTANCES: Final = (
    (re.compile(r"^(nn\.Module: .*)_\d+$"), r"\1"),
    (re.compile(r"^(FSDP::\w+ \(.*?)\b\d+\b(.*)$"), r"\1N\2"),
    (re.compile(r"^(## Call CompiledFxGraph) \S+ ##$"), r"\1"),
    (re.compile(r"^(perfscope::pipeline#\w+\|\d+)\|\d+$"), r"\1"),
)
"""Names of ranges that are there once for each instance of a module, layer or micro-batch -> the name of them all."""
_NO_PRODUCTS: Final = "It has no matrix products whose FLOPs are counted."
_NO_PEAK: Final = "No FLOPs are counted for it, or the peak of the device for this type is not known."


def values(summary: Summary) -> dict[str, Any]:
    """What the template of this section shows."""
    return {
        "kernels": kernel_table(summary.kernels) if summary.kernels else None,
        "operators": operator_table(summary.operators) if summary.operators else None,
        "modules": module_table(summary.modules) if summary.modules else None,
        "compiled": compiled_table(summary.compiled) if summary.compiled else None,
        "compiled_modules": compiled_module_table(summary.compiled_modules) if summary.compiled_modules else None,
        "launches": launch_table(summary.launches) if summary.launches else None,
        "ncu_command": summary.ncu_command,
        "has_roofline": any(row.roofline for row in summary.kernels),
    }


def kernel_table(rows: Sequence[KernelRow]) -> HtmlTable:
    """The costliest kernels and all that are worth a look."""
    shown = [row for at, row in enumerate(rows) if at < SHOWN or row.worth_a_look]
    columns = [
        _names("Kernel", [row.name for row in shown], short_name),
        tables.durations("Time", [row.us_per_step for row in shown], definition="kernel_time"),
        tables.column("of device time", [row.share for row in shown], percent, reason="", definition="kernel_time"),
        *(
            [tables.words("Worth a look", [row.worth_a_look or "" for row in shown], reason="Nothing stands out.")]
            if any(row.worth_a_look for row in shown)
            else []
        ),
        *origin_columns(shown),
        tables.words("Class", [row.operator_class for row in shown], definition="kernel_class"),
        tables.words("Operator", [row.operator or "" for row in shown], reason="Not launched by an operator."),
        tables.column("Count", [row.count_per_step for row in shown], count_per_step),
        tables.durations("Mean", [row.mean_us for row in shown]),
        *_efficiency(shown),
        *_roofline(shown),
        *_slowest(shown),
    ]
    noted = sum(row.worth_a_look is not None for row in rows)
    reading = f"{plural(noted, 'kernel is', 'kernels are')} worth a look." if noted else "No kernel stands out."
    return tables.table("kernels", "Kernels, per rank and step", columns, reading + _left_out(len(rows), len(shown)))


def operator_table(rows: Sequence[OperatorRow]) -> HtmlTable:
    """The costliest operators."""
    shown = rows[:SHOWN]
    on_device = any(row.device_us_per_step for row in rows)
    columns = [
        tables.words("Operator", [row.name for row in shown]),
        *origin_columns(shown),
        tables.words("Class", [row.operator_class for row in shown], definition="kernel_class"),
        tables.column("Calls", [row.count_per_step for row in shown], count_per_step),
        tables.durations("Host", [row.host_us_per_step for row in shown], definition="operator_host"),
    ]
    if on_device:
        columns += [
            tables.durations("Device", [row.device_us_per_step for row in shown], definition="operator_device"),
            tables.column("Kernels", [row.kernels_per_step for row in shown], count_per_step),
        ]
    if any(row.flops_per_step for row in shown):
        columns.append(
            tables.column(
                "FLOPs", [row.flops_per_step for row in shown], flop, definition="operator_flops", reason=_NO_PRODUCTS
            )
        )
        columns += _efficiency(shown)
    return tables.table("operators", "Operators, per rank and step", columns, _left_out(len(rows), len(shown)).strip())


def module_table(rows: Sequence[ModuleRow]) -> HtmlTable:
    """The costliest named ranges; the instances of one class of module together."""
    folded = sorted(_by_class(rows), key=lambda row: (-row.device_us_per_step, -row.host_us_per_step))
    shown = folded[:SHOWN]
    columns = [
        tables.words("Range", [row.name for row in shown]),
        tables.column("Depth", [row.depth for row in shown], count_per_step, definition="range_depth"),
        tables.column("Count", [row.count_per_step for row in shown], count_per_step),
        tables.durations("Host", [row.host_us_per_step for row in shown], definition="range_host"),
    ]
    if any(row.kernels_per_step for row in shown):
        columns += [
            tables.durations("Device", [row.device_us_per_step for row in shown], definition="range_device"),
            tables.column("Kernels", [row.kernels_per_step for row in shown], count_per_step),
        ]
    return tables.table(
        "modules", "Modules and other ranges, per rank and step", columns, _left_out(len(folded), len(shown)).strip()
    )


def launch_table(rows: Sequence[LaunchRow]) -> HtmlTable:
    """How each rank launches work; of many those that differ."""
    columns = [
        tables.ranks("Rank", [row.rank for row in rows]),
        tables.column("Launches", [row.launches_per_step for row in rows], count_per_step),
        tables.durations("Call", [row.call_us_mean for row in rows], definition="launch_call"),
        tables.durations("Launch delay, median", [row.delay_us_median for row in rows], definition="launch_delay"),
        tables.durations("95th percentile", [row.delay_us_p95 for row in rows], definition="launch_delay"),
        tables.column("Queue", [row.queue_depth_median for row in rows], significant, definition="queue_depth"),
        tables.column("Device idle", [row.starved_share for row in rows], percent, definition="starved"),
        tables.column(
            "Short kernels",
            [row.short_kernels_share for row in rows],
            percent,
            reason="No kernel.",
            definition="short_kernels",
        ),
    ]
    return tables.collapsed(tables.table("launches", "Launches, per step", columns, _launch_reading(rows)))


def _launch_reading(rows: Sequence[LaunchRow]) -> str:
    worst = max(rows, key=lambda row: row.starved_share or 0.0)
    if not worst.starved_share:
        return "No launch found an idle device."
    return f"Rank {worst.rank} is most launch-bound: {percent(worst.starved_share)} of launches found an idle device."


def _left_out(all_rows: int, shown: int) -> str:
    return f" The costliest {shown} of {all_rows} are shown; --json has more." if shown < all_rows else ""


def _by_class(rows: Iterable[ModuleRow]) -> list[ModuleRow]:
    folded: dict[str, ModuleRow] = {}
    for row in rows:
        name = row.name
        for pattern, common in _INSTANCES:
            name = pattern.sub(common, name)
        known = folded.get(name)
        folded[name] = replace(row, name=name) if known is None else _sum(known, row)
    return list(folded.values())


def _sum(first: ModuleRow, second: ModuleRow) -> ModuleRow:
    return replace(
        first,
        depth=min(first.depth, second.depth),
        count_per_step=first.count_per_step + second.count_per_step,
        host_us_per_step=first.host_us_per_step + second.host_us_per_step,
        device_us_per_step=first.device_us_per_step + second.device_us_per_step,
        kernels_per_step=first.kernels_per_step + second.kernels_per_step,
    )


def _names(label: str, names: Sequence[str], shorten: Any) -> Filled:
    column = tables.words(label, list(names)).column
    cells = []
    for name in names:
        short = shorten(name)
        cells.append(Cell(text=short, order=short, reason=name[:_LONGEST_NAME] if short != name else ""))
    return Filled(column=column, cells=tuple(cells))


def _efficiency(rows: Sequence[KernelRow | OperatorRow]) -> list[Filled]:
    """Type, rate and share of the peak; nothing where no row has a rate."""
    if all(row.tflops is None for row in rows):
        return []
    rates = [row.tflops for row in rows]
    columns = [
        tables.words("Type", [_type(row) for row in rows], definition="kernel_type", reason=_NO_PRODUCTS),
        tables.column("Rate", rates, significant, unit="TFLOP/s", definition="kernel_rate", reason=_NO_PRODUCTS),
    ]
    if any(row.share_of_peak is not None for row in rows):
        columns.append(
            tables.column(
                "of peak", [row.share_of_peak for row in rows], percent, reason=_NO_PEAK, definition="kernel_rate"
            )
        )
    return columns


def _type(row: KernelRow | OperatorRow) -> str:
    unused = isinstance(row, KernelRow) and row.tensor_cores is False
    return f"{row.dtype or ''}{', no tensor cores' if unused else ''}" if row.dtype else ""


def _roofline(rows: Sequence[KernelRow]) -> list[Filled]:
    """What Nsight Compute measured; nothing where it measured none of these."""
    measured = [row.roofline for row in rows]
    if not any(measured):
        return []
    reason = "Not measured by Nsight Compute."
    bounds = [roofline.bound if roofline else "" for roofline in measured]

    def column(label: str, parts: list[float | None]) -> Filled:
        return tables.column(label, parts, percent, reason=reason, definition="roofline")

    return [
        column("Compute", [roofline.compute_share if roofline else None for roofline in measured]),
        column("Memory", [roofline.memory_share if roofline else None for roofline in measured]),
        column("Occupancy", [roofline.occupancy if roofline else None for roofline in measured]),
        tables.words("Bound by", bounds, definition="roofline", reason=reason),
    ]


def _slowest(rows: Sequence[KernelRow]) -> list[Filled]:
    """The rank on which a kernel takes longest; nothing with one rank."""
    if all(row.slowest_rank is None for row in rows):
        return []
    cells = [
        absent("It ran on one rank only.")
        if row.slowest_rank is None or row.slowest_over_median is None
        else Cell(
            text=factor(row.slowest_over_median),
            order=row.slowest_over_median,
            reason=f"rank {row.slowest_rank}, {duration(row.mean_us)} mean over all ranks",
        )
        for row in rows
    ]
    return [tables.numbers("Slowest rank", cells, definition="slowest_rank")]
