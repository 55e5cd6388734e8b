"""Compiled code: its calls and its modules, led back to the lines of the program."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from perfscope.reports import tables
from perfscope.reports.tables import Cell, Filled, Heading, HtmlTable, absent
from perfscope.results.tables import CompiledModuleRow, CompiledRow, KernelRow, OperatorRow
from perfscope.text import count_per_step, percent

SHOWN: Final = 20
"""Rows of a table on the page; the machine-readable result has more."""
_NAMED: Final = 3
"""Modules or lines in a cell; all of them show on hover."""
_UNKNOWN: Final = "Not known: the notes say why."
_NOT_COMPILED: Final = "Not in compiled code or an annotated CUDA graph, or not known there."


def compiled_table(rows: Sequence[CompiledRow]) -> HtmlTable:
    """The costliest calls in compiled code."""
    shown = rows[:SHOWN]
    on_device = any(row.device_us_per_step for row in rows)
    columns = [
        tables.words("Call", [row.name for row in shown], definition="compiled_call"),
        _places("Modules", [row.modules for row in shown], _UNKNOWN),
        _lines([row.lines for row in shown], [row.code for row in shown], _UNKNOWN),
        tables.words("Pass", [row.direction or "" for row in shown], reason=_UNKNOWN),
        *([tables.durations("Device", [row.device_us_per_step for row in shown])] if on_device else []),
        tables.durations("Host", [row.host_us_per_step for row in shown]),
        tables.column("Share", [row.share for row in shown], percent, reason="", definition="compiled_share"),
        tables.column("Calls", [row.count_per_step for row in shown], count_per_step),
    ]
    left_out = (
        f"The costliest {len(shown)} of {len(rows)} are shown; --json has more." if len(shown) < len(rows) else ""
    )
    return tables.table("compiled", "Compiled code and CUDA graphs, per rank and step", columns, left_out)


def compiled_module_table(rows: Sequence[CompiledModuleRow]) -> HtmlTable:
    """The costliest modules in compiled code."""
    shown = rows[:SHOWN]
    columns = [
        tables.words("Module", [row.module for row in shown], definition="compiled_module"),
        tables.words("Class", [row.kind for row in shown], reason="No module is known."),
        tables.column("Modules", [row.instances for row in shown], str),
        tables.durations("Forward", [row.forward_us_per_step for row in shown]),
        tables.durations("Backward", [row.backward_us_per_step for row in shown]),
        tables.durations("Shared", [row.shared_us_per_step for row in shown], definition="compiled_shared"),
    ]
    reading = "A kernel that computes operations of several modules counts in each of them."
    return tables.table(
        "compiled-modules", "Modules in compiled code and CUDA graphs, per rank and step", columns, reading
    )


def origin_columns(rows: Sequence[KernelRow | OperatorRow]) -> list[Filled]:
    """Modules and lines of the rows that are in compiled code; nothing where none is."""
    if not any(row.modules or row.lines for row in rows):
        return []
    return [
        _places("Modules", [row.modules for row in rows], _NOT_COMPILED),
        _lines([row.lines for row in rows], [()] * len(rows), _NOT_COMPILED),
    ]


def _places(label: str, places: Sequence[tuple[str, ...]], reason: str) -> Filled:
    cells = [Cell(text=_some(each), order=each[0], reason=_all(each)) if each else absent(reason) for each in places]
    return Filled(column=Heading(label=label, definition="compiled_lines", numeric=False), cells=tuple(cells))


def _lines(lines: Sequence[tuple[str, ...]], code: Sequence[tuple[str, ...]], reason: str) -> Filled:
    """Files by their last name; whole paths and the lines' text on hover."""
    cells = []
    for each, texts in zip(lines, code, strict=True):
        full = [f"{line}  {text}".rstrip() for line, text in zip(each, texts or ("",) * len(each), strict=True)]
        short = tuple(re.split(r"[/\\]", line)[-1] for line in each)
        cells.append(Cell(text=_some(short), order=short[0], reason="; ".join(full)) if each else absent(reason))
    return Filled(column=Heading(label="Lines", definition="compiled_lines", numeric=False), cells=tuple(cells))


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _all(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) > _NAMED else ""
