"""What makes a function a tool: its title, the classes that it answers with, and the parameters that tools share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, TypeVar

from pydantic import Field

from perfscope.errors import UnusableInput, did_you_mean
from perfscope.frozen import dataclass
from perfscope.results.columns import Column
from perfscope.results.frames import TABLES
from perfscope.results.summary import Summary
from perfscope.server.answers import Answer
from perfscope.server.folder import Folder, Recording
from perfscope.server.opened import Analyses, state_of
from perfscope.server.schemas import row_as_json, schema_of, schema_of_row

Function = TypeVar("Function", bound=Callable[..., Answer])

RecordingName = Annotated[str, Field(description="Name of a recording, as list_recordings gives it.")]
Capture = Annotated[
    int | None, Field(ge=0, description="Which capture, counted from 0. Default: the last one that most ranks have.")
]
Contains = Annotated[str | None, Field(description="Only rows whose name contains this text; upper case or lower.")]
OrderBy = Annotated[
    str | None, Field(description="Column to sort by; -column puts the largest first. Default: as the table is.")
]
MaxRows = Annotated[int | None, Field(ge=1, description="At most so many rows. Default: as many as fit.")]
Cursor = Annotated[
    str | None, Field(description="next_cursor of the answer before, for the rows that follow; same arguments again.")
]

_MARK: Final = "perfscope_tool"


@dataclass(frozen=True)
class Spec:
    """What the client learns of a tool beside its description and its parameters."""

    title: str
    head: type
    rows: tuple[dict[str, Any], ...]
    """JSON Schemas of its rows, one for each kind; empty for an answer without rows."""


def tool(title: str, head: type, *rows: type | str | dict[str, Any]) -> Callable[[Function], Function]:
    """Make a method a tool that answers with ``head`` and ``rows``: classes, names of tables, or schemas."""
    schemas = tuple(
        row if isinstance(row, dict) else schema_of_row(TABLES[row].columns) if isinstance(row, str) else schema_of(row)
        for row in rows
    )

    def marked(function: Function) -> Function:
        setattr(function, _MARK, Spec(title, head, schemas))
        return function

    return marked


def spec_of(method: Callable[..., Any]) -> Spec | None:
    """What ``tool`` said of a method; None where it is no tool."""
    found: Spec | None = getattr(method, _MARK, None)
    return found


class Tools:
    """Tools of one subject, over one folder."""

    def __init__(self, folder: Folder, analyses: Analyses) -> None:
        self.folder, self.analyses = folder, analyses

    def opened(self, name: str, capture: int | None = None) -> tuple[Recording, Summary]:
        """A recording and its analysis. Raises UnusableInput naming what to do."""
        recording = self.folder.find(name)
        return recording, self.analyses.summary(recording, capture)


def table_answer(
    head: Any,
    recording: Recording,
    summary: Summary,
    name: str,
    *,
    where: dict[str, Any] | None = None,
    order_by: str | None = None,
    columns: Sequence[str] = (),
) -> Answer:
    """Rows of one of the summary's tables: those that ``where`` admits, in the order asked for.

    Raises UnusableInput for a column that the table has not.
    """
    table = TABLES[name]
    rows = list(table.rows(summary))
    for key, wanted in (where or {}).items():
        column = column_of(name, key)
        rows = [row for row in rows if _admits(column.get(row), wanted)]
    if order_by is not None:
        rows = _sorted(rows, column_of(name, order_by.removeprefix("-")), falling=order_by.startswith("-"))
    shown = tuple(column_of(name, column) for column in columns) or table.columns
    return Answer(fixed=head, rows=rows, to_json=lambda row: row_as_json(shown, row), state=state_of(recording))


def column_of(table: str, name: str) -> Column:
    """A table's column. Raises UnusableInput, naming those that there are."""
    known = {column.name: column for column in TABLES[table].columns}
    if name not in known:
        raise UnusableInput(
            f"table {table} has no column {name!r}{did_you_mean(name, known)}; it has {', '.join(known)}"
        )
    return known[name]


def _admits(value: Any, wanted: Any) -> bool:
    """A text contains the one asked for, a list of ranks has the rank, anything else is equal."""
    if isinstance(value, str) and isinstance(wanted, str):
        return wanted.lower() in value.lower()
    if isinstance(value, (tuple, list)):
        return wanted in value
    return bool(value == wanted)


def _sorted(rows: list[Any], column: Column, *, falling: bool) -> list[Any]:
    """Rows by one column; rows without a value come last. Raises UnusableInput where it has no order."""
    known = [row for row in rows if column.get(row) is not None]
    missing = [row for row in rows if column.get(row) is None]
    try:
        return sorted(known, key=column.get, reverse=falling) + missing
    except TypeError as error:
        raise UnusableInput(f"column {column.name!r} has no order; sort by a column of numbers or names") from error
