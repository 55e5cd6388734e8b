"""The tables of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from perfscope.comparison import CollectiveChange, Comparison, Difference, RankChange, Scaling, WorkChange
from perfscope.reports import tables
from perfscope.reports.difference_words import LABELS, metric_value, relative, row_name, signed, verdict_word
from perfscope.reports.format import ABSENT, byte_size, share, significant
from perfscope.reports.tables import Cell, Filled, Table

MOST_ROWS: Final = 60
"""Kernels and operators listed; those beyond changed least."""

_Row = TypeVar("_Row")
_NOT_RECORDED: Final = "not in this recording"


def difference_tables(difference: Difference, suffix: str) -> list[Table]:
    """Everything but the account, which the page draws; empty tables are left out."""
    made = [
        _metrics(difference, suffix),
        _path(difference, suffix),
        _ranks(difference.ranks, suffix),
        _collectives(difference.collectives, suffix),
        _work("kernels", "Kernels", difference.kernels, suffix),
        _work("operators", "Operators", difference.operators, suffix),
    ]
    return [table for table in made if table is not None]


def account_table(difference: Difference, suffix: str) -> Table | None:
    """The rows of the account before and after."""
    rows = difference.rows
    if not rows:
        return None
    largest = max(difference.step.before_us, difference.step.after_us)
    columns = [
        tables.words("Row", [row_name(row.name) for row in rows]),
        tables.durations("Before", [row.before_us for row in rows], largest=largest),
        tables.durations("After", [row.after_us for row in rows], largest=largest),
        _deltas([row.delta_us for row in rows]),
        _from_to("99% interval", [(row.low_us, row.high_us) for row in rows]),
        _verdicts([row.real for row in rows]),
    ]
    reading = "Mean over ranks. The changes add up to that of the step time."
    return tables.table(f"account{suffix}", "Every row of the account", columns, reading)


def settings_table(difference: Difference, suffix: str) -> Table | None:
    """What about the runs differs."""
    changes = difference.settings
    if not changes:
        return None
    columns = [
        tables.words("What", [change.name for change in changes]),
        tables.words("Kind", [change.about for change in changes]),
        tables.words("Before", [change.before or "" for change in changes], reason="not set, or not recorded"),
        tables.words("After", [change.after or "" for change in changes], reason="not set, or not recorded"),
    ]
    return tables.table(f"settings{suffix}", "What differs between the runs", columns)


def scaling_table(comparison: Comparison, scaling: Scaling) -> Table:
    """Work per second and device over numbers of devices."""
    rows = scaling.rows
    columns = [
        tables.words("Run", [comparison.runs[row.run].label for row in rows]),
        _counts("Devices", [row.devices for row in rows]),
        tables.durations("Step", [row.step_time_us for row in rows], definition="step_time"),
        tables.words("Scaling", [row.kind for row in rows], definition="scaling_kind"),
        _numbers("Speed-up", [row.speedup for row in rows], lambda value: f"{significant(value)}×"),
        _numbers("Efficiency", [row.efficiency for row in rows], share, definition="efficiency"),
        tables.durations("Ideal step", [row.ideal_step_us for row in rows]),
    ]
    names = [name for name in (rows[0].lost_us or {}) if any(abs(row.lost_us.get(name, 0.0)) > 0 for row in rows)]
    columns += [_deltas([row.lost_us.get(name) for row in rows], row_name(name)) for name in names]
    reading = (
        f"Work of a device told by: {scaling.work_from}. The columns from the account are what a step takes beyond the "
        "ideal; they add up to step − ideal."
    )
    return tables.table("scaling", "Where scaling loses", columns, reading)


def _metrics(difference: Difference, suffix: str) -> Table | None:
    changes = difference.metrics
    if not changes:
        return None
    columns = [
        tables.words("Number", [LABELS.get(change.name, change.name) for change in changes]),
        _cells("Before", [(metric_value(change.before, change.unit), change.before) for change in changes]),
        _cells("After", [(metric_value(change.after, change.unit), change.after) for change in changes]),
        _cells("Change", [(relative(change.before, change.after), change.delta) for change in changes]),
        _verdicts([change.real for change in changes]),
    ]
    return tables.table(f"metrics{suffix}", "Numbers of the whole job", columns)


def _path(difference: Difference, suffix: str) -> Table | None:
    rows = difference.path
    if not rows:
        return None
    columns = [
        tables.words("Category", [row_name(row.category) for row in rows]),
        tables.durations("Before", [row.before_us for row in rows]),
        tables.durations("After", [row.after_us for row in rows]),
        _deltas([row.delta_us for row in rows]),
    ]
    reading = "The chain of dependent work that fixes the step time, all ranks; its changes add up to the step's too."
    return tables.table(f"path{suffix}", "Critical path", columns, reading)


def _ranks(rows: Sequence[RankChange], suffix: str) -> Table | None:
    if not rows:
        return None
    names = [name for name in rows[0].rows_us if any(abs(row.rows_us[name]) >= 0.5 for row in rows)]
    columns = [tables.ranks("Rank", [row.rank for row in rows])]
    if any(row.host_before != row.host_after for row in rows):
        columns.append(tables.words("Host before", [row.host_before for row in rows]))
        columns.append(tables.words("Host after", [row.host_after for row in rows]))
    columns += [
        tables.durations("Step before", [row.before_us for row in rows]),
        tables.durations("Step after", [row.after_us for row in rows]),
        _deltas([row.delta_us for row in rows], "Step"),
        *(_deltas([row.rows_us[name] for row in rows], row_name(name)) for name in names),
        tables.words("Own work", ["changed otherwise" if row.stands_out else "as its peers" for row in rows]),
    ]
    reading = "Change of each rank's own account. A rank whose own work changed otherwise than its peers' is named so."
    return tables.table(f"ranks{suffix}", "Rank by rank", columns, reading)


def _collectives(rows: Sequence[CollectiveChange], suffix: str) -> Table | None:
    if not rows:
        return None
    columns = [
        tables.words("Group", [row.group for row in rows]),
        tables.words("Kind", [row.kind.replace("_", "-") for row in rows]),
        tables.words("Type", [row.dtype or "" for row in rows]),
        _cells("Size", [(byte_size(row.bytes), row.bytes) for row in rows]),
        tables.words("In", [_STATUS[row.status] for row in rows]),
        _counts("Before, a step", [row.count_before for row in rows]),
        _counts("After, a step", [row.count_after for row in rows]),
        tables.durations("Transfer before", [row.transfer_before_us for row in rows], reason=_NOT_RECORDED),
        tables.durations("Transfer after", [row.transfer_after_us for row in rows], reason=_NOT_RECORDED),
        _deltas([row.delta_us for row in rows], "Change a step"),
        _deltas([row.wait_delta_us for row in rows], "Wait, change a step"),
        _verdicts([row.real for row in rows]),
    ]
    reading = "Transfer is the mean of one instance; changes are per step. Judged by the noise of the whole step."
    return tables.table(f"collectives{suffix}", "Collectives", columns, reading)


def _work(name: str, title: str, rows: Sequence[WorkChange], suffix: str) -> Table | None:
    shown = [row for row in rows if abs(row.delta_us) > 0][:MOST_ROWS]
    if not shown:
        return None
    columns = [
        tables.words(title[:-1], [row.name for row in shown]),
        tables.words("Class", [row.category for row in shown]),
        tables.words("In", [_STATUS[row.status] for row in shown]),
        _counts("Calls before", [row.count_before for row in shown]),
        _counts("Calls after", [row.count_after for row in shown]),
        tables.durations("Before", [row.before_us for row in shown]),
        tables.durations("After", [row.after_us for row in shown]),
        _deltas([row.delta_us for row in shown]),
        _deltas([row.from_count_us for row in shown], "by number of calls"),
        _deltas([row.from_duration_us for row in shown], "by length of calls"),
        _verdicts([row.real for row in shown]),
    ]
    more = f" The {MOST_ROWS} largest of {len(rows)}." if len(rows) > MOST_ROWS else ""
    reading = f"Per rank and step, the largest change first.{more}"
    return tables.table(f"{name}{suffix}", title, columns, reading)


_STATUS: Final = {"both": "both", "gone": "before only", "new": "after only"}


def _deltas(values: Sequence[float | None], label: str = "Change") -> Filled:
    filled = tables.durations(label, [None if value is None else abs(value) for value in values], reason=_NOT_RECORDED)
    cells = [
        cell if value is None else Cell(text=_with_sign(cell.text, value), order=value)
        for cell, value in zip(filled.cells, values, strict=True)
    ]
    return Filled(column=filled.column, cells=tuple(cells))


def _with_sign(text: str, value: float) -> str:
    if value == 0 or text == "0":
        return "0"
    return f"{'−' if value < 0 else '+'}{text}"


def _verdicts(values: Sequence[bool | None]) -> Filled:
    return tables.words("Verdict", [verdict_word(value) for value in values], definition="beyond_noise")


def _from_to(label: str, ends: Sequence[tuple[float | None, float | None]]) -> Filled:
    cells = [
        tables.absent("not recorded step by step")
        if low is None or high is None
        else Cell(text=f"{signed(low)} to {signed(high)}" if low or high else "0", order=low)
        for low, high in ends
    ]
    return tables.numbers(label, cells)


def _cells(label: str, values: Sequence[tuple[str, float | None]]) -> Filled:
    return tables.numbers(
        label,
        [tables.absent(_NOT_RECORDED) if text == ABSENT else Cell(text=text, order=value) for text, value in values],
    )


def _counts(label: str, values: Sequence[float]) -> Filled:
    return _numbers(label, values, lambda value: f"{value:,.4g}")


def _numbers(label: str, values: Sequence[float], write: Callable[[float], str], definition: str = "") -> Filled:
    return tables.numbers(label, [Cell(text=write(value), order=value) for value in values], definition=definition)
