"""The ten rows of the account as the page names, groups and orders them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from perfscope.summary import ROWS, AccountRow

COMMUNICATION: Final = ("exposed_comm_wait", "exposed_comm_transfer")
"""The rows that together are the exposed communication."""


@dataclass(frozen=True)
class Category:
    """One row of the account in words."""

    name: str
    """As in ``summary.ROWS``; also its key in the glossary and, behind ``--c-``, its colour in the style sheet."""
    label: str
    short: str
    """For a line in the terminal."""
    group: str
    phrase: str
    """In a sentence: "… goes to <phrase>"."""


CATEGORIES: Final = (
    Category("compute", "Compute", "compute", "Compute", "computing"),
    Category("exposed_comm_wait", "Waiting for late ranks", "wait", "Communication", "waiting for late ranks"),
    Category(
        "exposed_comm_transfer", "Transfer, not hidden", "transfer", "Communication", "transfers that nothing hides"
    ),
    Category("exposed_copy", "Copy, not hidden", "copy", "Copy", "copies that nothing hides"),
    Category("idle_dataloader", "Data loading", "dataloader", "Idle", "waiting for data"),
    Category("idle_sync", "Blocked in a sync", "sync", "Idle", "synchronising host and device"),
    Category("idle_launch", "Launching", "launch", "Idle", "launching operators"),
    Category("idle_host", "Other host work", "host", "Idle", "Python and other work on the host"),
    Category("idle_dependency", "Held by a dependency", "dependency", "Idle", "queued work held by a dependency"),
    Category("idle_unknown", "Unknown", "unknown", "Idle", "unknown causes"),
)
"""In the account's order."""

IDLE: Final = tuple(category.name for category in CATEGORIES if category.group == "Idle")
"""The rows that together are the idle time."""

BY_NAME: Final = {category.name: category for category in CATEGORIES}

if tuple(BY_NAME) != ROWS:
    raise AssertionError("reports.categories and summary.ROWS name different rows")


def shares(rows: Sequence[AccountRow]) -> dict[str, float]:
    """Share (0..1) of all ranks' step time that each row of the account takes; all 0 without ranks."""
    total = math.fsum(row.step_time_us for row in rows)
    if not total > 0:
        return dict.fromkeys(ROWS, 0.0)
    return {name: math.fsum(row.rows()[name] for row in rows) / total for name in ROWS}


def largest_loss(rows: Sequence[AccountRow]) -> tuple[Category, float] | None:
    """The row other than compute that takes most of all ranks' time, with its share; None where nothing is lost."""
    taken = shares(rows)
    name = max((name for name in ROWS if name != "compute"), key=lambda name: taken[name])
    return (BY_NAME[name], taken[name]) if taken[name] > 0 else None


def row_share(row: AccountRow, *names: str) -> float:
    """Share (0..1) of one rank's step that the named rows take together; 0 for a step without length."""
    values = row.rows()
    return math.fsum(values[name] for name in names) / row.step_time_us if row.step_time_us > 0 else 0.0
