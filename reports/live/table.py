"""The table of ranks: those that matter first, as many columns as fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from perfscope.analyzers.live.ring import COLUMNS
from perfscope.analyzers.live.state import LiveRank
from perfscope.frozen import dataclass
from perfscope.reports.live.view import View
from perfscope.reports.live.words import columns, cut, safe, stage_word
from perfscope.text import ABSENT, byte_size, duration, percent

TROUBLED: Final = ("failed", "gone", "silent", "behind")
"""States of ranks that come first, the worst first."""

NOTICEABLE: Final = 0.02
"""Share of the step from which a rank's excess is marked."""


@dataclass(frozen=True)
class Column:
    """One column of the table."""

    title: str
    width: int
    text: Callable[[LiveRank], str]
    left: bool = False


def sorted_ranks(ranks: Sequence[LiveRank], view: View) -> list[LiveRank]:
    """The ranks in the order that the user chose."""
    keys: dict[str, Callable[[LiveRank], tuple[float, ...]]] = {
        "d": lambda row: (_trouble(row), -(row.excess_us or 0.0), row.rank),
        "t": lambda row: (-(row.step_us or 0.0), row.rank),
        "l": lambda row: (-row.stages_us.get("dataloader", 0.0), row.rank),
        "c": lambda row: (-(row.cores or 0.0), row.rank),
        "g": lambda row: (-(row.device.utilisation or 0.0) if row.device else 1.0, row.rank),
        "s": lambda row: (row.last_step, row.rank),
        "r": lambda row: (row.rank,),
    }
    return sorted(ranks, key=keys[view.sort], reverse=view.reverse)


def chosen_columns(ranks: Sequence[LiveRank], width: int) -> list[Column]:
    """Columns that have something to show, the more important ones where not all fit."""
    measured = {stage for row in ranks for stage in row.stages_us}
    hosts = max((columns(safe(host)) for host in {row.host for row in ranks}), default=0)
    wanted = [
        Column("rank", 6, lambda row: f"{row.rank}"),
        Column("state", 9, lambda row: row.state, left=True),
        Column("step time", 10, lambda row: duration(row.step_us)),
        Column("slower by", 10, _excess),
        *(_stage(stage) for stage in COLUMNS[1:] if stage in measured),
    ]
    if any(row.cores is not None for row in ranks):
        wanted.append(Column("cores", 6, lambda row: ABSENT if row.cores is None else f"{row.cores:.1f}"))
    if any(row.device is not None for row in ranks):
        wanted.append(Column("GPU", 5, lambda row: percent(row.device.utilisation if row.device else None)))
        wanted.append(Column("GPU memory", 10, _memory))
    wanted.append(Column("last step", 11, lambda row: f"{row.last_step:,}" if row.last_step >= 0 else ABSENT))
    if hosts:
        wanted.append(Column("host", min(max(hosts, 4), 24), lambda row: safe(row.host), left=True))
    chosen: list[Column] = []
    used = -2
    for column in wanted:
        if used + 2 + column.width <= width:
            chosen.append(column)
            used += 2 + column.width
    return chosen


def heading(shown: Sequence[Column]) -> str:
    """The titles of the columns."""
    return "  ".join(_cell(column.title, column) for column in shown)


def line(row: LiveRank, shown: Sequence[Column]) -> str:
    """One rank's line."""
    return "  ".join(_cell(column.text(row), column) for column in shown)


def tone(row: LiveRank, step_us: float | None) -> str:
    """``bad`` for a rank in trouble, ``warning`` for one that others wait for."""
    if row.state in TROUBLED:
        return "bad" if row.state != "behind" else "warning"
    return "warning" if step_us and (row.excess_us or 0.0) >= NOTICEABLE * step_us else ""


def _stage(stage: str) -> Column:
    return Column(stage_word(stage), 9, lambda row: duration(row.stages_us.get(stage)))


def _excess(row: LiveRank) -> str:
    return "" if row.excess_us == 0 else duration(row.excess_us)


def _memory(row: LiveRank) -> str:
    return byte_size(row.device.memory_used_bytes if row.device else None)


def _trouble(row: LiveRank) -> int:
    return TROUBLED.index(row.state) if row.state in TROUBLED else len(TROUBLED)


def _cell(text: str, column: Column) -> str:
    text = cut(text, column.width)
    blank = " " * (column.width - columns(text))
    return text + blank if column.left else blank + text
