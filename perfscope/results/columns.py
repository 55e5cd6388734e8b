"""A table of rows as a DataFrame: its columns are the fields of the rows' class, with their units and meanings.

What a row holds nested (a mapping, rows of its own, arrays in parallel) can have a row for each element.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from operator import attrgetter
from typing import Any, Final, Protocol, overload

import pandas as pd

from perfscope.frozen import dataclass
from perfscope.results.fields import SHARED, Field, fields_of

_DTYPES: Final = {int: ("int64", "Int64"), float: ("float64", "float64"), bool: ("bool", "boolean")}
"""Type of a field -> pandas' type, and that where it may be None; anything else is an object."""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str
    dtype: str
    unit: str
    """Empty for names, numbers and flags."""
    meaning: str
    get: Callable[[Any], Any]
    """A row's value; None where it has none."""
    type: Any
    """Of the values, without None; ``object`` for a choice of several types."""


class _Tables(Protocol):
    def __getitem__(self, name: str, /) -> pd.DataFrame: ...


class Table:
    """A table of ``Frames``: an attribute that becomes a DataFrame when it is first asked for."""

    def __init__(
        self,
        kind: type,
        meaning: str,
        path: str | Callable[[Any], Any] = "",
        *,
        without: Collection[str] = (),
        only: Collection[str] = (),
        each: tuple[str, ...] = (),
        texts: Collection[str] = (),
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        """``kind`` is the class of the rows, ``path`` where a summary has them (else under the table's own name).

        All fields are columns but those in ``without``; or ``only`` some. ``each`` names what is nested, and has a row
        for each element: a mapping (columns ``key`` and the field), a tuple of rows (their fields are columns), or
        tuples in parallel. ``texts`` are places in the row's ``texts``. ``renamed`` maps a column's name to another.
        """
        self.__doc__ = meaning
        self._kind, self._path, self._each, self._texts = kind, path, each, texts
        self._only, self._without, self._renamed = only, without, renamed or {}

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, frames: None, owner: type) -> Table: ...
    @overload
    def __get__(self, frames: _Tables, owner: type) -> pd.DataFrame: ...
    def __get__(self, frames: _Tables | None, owner: type) -> Table | pd.DataFrame:
        """The table itself, or what it is in a summary."""
        return self if frames is None else frames[self._name]

    def frame(self, summary: Any) -> pd.DataFrame:
        """The rows as a DataFrame. Types are the columns' own, also where there is no row."""
        rows = tuple(self.rows(summary))
        made: pd.DataFrame = pd.DataFrame(
            {column.name: pd.Series([column.get(row) for row in rows], dtype=column.dtype) for column in self.columns}
        )
        return made

    def rows(self, summary: Any) -> Iterator[Any]:
        """The summary's rows; where something is nested, (row, element of each) for each element."""
        held = self._path(summary) if callable(self._path) else summary
        for name in () if callable(self._path) else (self._path or self._name).split("."):
            held = None if held is None else getattr(held, name)
        for row in () if held is None else held if isinstance(held, tuple) else (held,):
            if self._each:
                nested = (getattr(row, name) for name in self._each)
                elements = (value.items() if isinstance(value, Mapping) else value for value in nested)
                yield from ((row, element) for element in itertools.zip_longest(*elements))
            else:
                yield row

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The columns, in the order of the fields."""
        return tuple(
            self._named(column)
            for field in fields_of(self._kind).values()
            if field.name not in self._without and (not self._only or field.name in self._only)
            for column in self._of(field)
        )

    def _named(self, column: Column) -> Column:
        name = self._renamed.get(column.name, column.name)
        return dataclasses.replace(column, name=name, meaning=column.meaning or SHARED.get(name, ""))

    def _of(self, field: Field) -> tuple[Column, ...]:
        if field.name in self._each:
            at = self._each.index(field.name)
            if len(field.items) == 2:
                key, value = field.items
                return (
                    _plain(key, lambda row: row[1][at][0], name="key", meaning=""),
                    _plain(value, lambda row: row[1][at][1], meaning=field.meaning),
                )
            (element,) = field.items
            if field.name in self._texts:
                return (_plain(dataclasses.replace(element, type=str), _looked_up(at), meaning=field.meaning),)
            if dataclasses.is_dataclass(element.type):
                return _spread(element, lambda row: row[1][at], prefix="")
            return (_plain(element, lambda row: row[1][at], meaning=field.meaning),)
        get: Callable[[Any], Any] = attrgetter(field.name)
        if self._each:
            return (_plain(field, lambda row: get(row[0])),)
        return (
            _spread(field, get, prefix=f"{field.name}_")
            if dataclasses.is_dataclass(field.type)
            else (_plain(field, get),)
        )


def _plain(field: Field, get: Callable[[Any], Any], name: str = "", meaning: str | None = None) -> Column:
    def value(row: Any) -> Any:
        held = get(row)
        return held.value if isinstance(held, enum.Enum) else held

    dtype = _DTYPES.get(field.type, ("object", "object"))[field.optional]
    unit = field.unit if dtype != "object" else ""
    return Column(name or field.name, dtype, unit, field.meaning if meaning is None else meaning, value, field.type)


def _spread(field: Field, get: Callable[[Any], Any], prefix: str) -> tuple[Column, ...]:
    """The columns of a row inside the row, missing where that is None."""
    inner = fields_of(field.type).values()
    return tuple(
        _plain(
            dataclasses.replace(each, optional=each.optional or bool(prefix)),
            _inside(get, each.name),
            name=prefix + each.name,
        )
        for each in inner
    )


def _inside(get: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
    return lambda row: None if get(row) is None else getattr(get(row), name)


def _looked_up(at: int) -> Callable[[Any], Any]:
    return lambda row: None if row[1][at] is None else row[0].texts[row[1][at]]
