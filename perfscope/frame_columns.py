"""Columns of a DataFrame from the fields of a row's dataclass: name, type, unit and meaning.

Types come from the fields' annotations, meanings from the strings below the fields, units from the fields' names (which
carry them throughout: ``_us``, ``_bytes``, ``_gbps`` …).
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from typing import Any, Final

import pandas as pd

_DTYPES: Final[dict[tuple[type, bool], str]] = {
    (int, False): "int64",
    (int, True): "Int64",
    (float, False): "float64",
    (float, True): "float64",
    (bool, False): "bool",
    (bool, True): "boolean",
}
"""(Type of a field, may it be None) -> pandas' type; anything else is an object."""

_UNITS: Final = (
    (re.compile(r"_bytes_per_s$"), "bytes/s"),
    (re.compile(r"(^|_)us(_|$)"), "µs"),
    (re.compile(r"(^|_)bytes(_|$)"), "bytes"),
    (re.compile(r"(^|_)gbps(_|$)"), "GB/s"),
    (re.compile(r"(^|_)tflops(_|$)"), "TFLOP/s"),
    (re.compile(r"(^|_)flops_per_step$"), "FLOP"),
    (
        re.compile(r"(^|_)share(_|$)|^(mfu|hfu|utilisation|occupancy|flops_coverage|fragmentation|residual|error)$"),
        "0..1",
    ),
    (re.compile(r"_over_|(^|_)ratio$|^(perturbation|imbalance)$"), "ratio"),
    (re.compile(r"_ppm$"), "ppm"),
    (re.compile(r"_mhz(_|$)"), "MHz"),
    (re.compile(r"^power_"), "W"),
    (re.compile(r"_c$"), "°C"),
    (re.compile(r"(^|_)cores(_|$)"), "cores"),
    (re.compile(r"^(runnable|threads)$"), "threads"),
    (re.compile(r"^(ceiling|trend)$"), "0.25 is 25 %"),
    (re.compile(r"_per_step$|^queue_depth"), "count"),
    (re.compile(r"^(price_)?per_(device_hour|step|1000_steps|day)"), "currency"),
)
"""What a numeric column's name says of its unit; the first that fits."""


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str
    dtype: str
    unit: str
    """Empty for names, numbers and flags."""
    meaning: str
    get: Callable[[Any], Any]
    """A row's value; None where it has none."""


def columns_of(
    kind: type, *, without: Collection[str] = (), renamed: Mapping[str, str] | None = None
) -> tuple[Column, ...]:
    """A column for each field of a row's class, in order; a row inside the row is spread out under its field's name.

    ``without`` leaves fields out; ``renamed`` maps a column's name to another.
    """
    names = renamed or {}
    columns = [
        dataclasses.replace(column, name=names.get(column.name, column.name))
        for name, hint in typing.get_type_hints(kind).items()
        if name not in without
        for column in _of_field(kind, name, hint)
    ]
    return tuple(columns)


def frame_of(columns: Iterable[Column], rows: Iterable[Any]) -> pd.DataFrame:
    """The rows as a table. Types are the columns' own, also where there is no row."""
    rows = tuple(rows)
    frame: pd.DataFrame = pd.DataFrame(
        {column.name: pd.Series([column.get(row) for row in rows], dtype=column.dtype) for column in columns}
    )
    return frame


def _of_field(kind: type, name: str, hint: Any) -> Iterable[Column]:
    inner, optional = _without_none(hint)
    if dataclasses.is_dataclass(inner) and isinstance(inner, type):
        return [
            dataclasses.replace(
                column, name=f"{name}_{column.name}", dtype=_nullable(column.dtype), get=_inside(name, column)
            )
            for column in columns_of(inner)
        ]
    dtype = _DTYPES.get((inner, optional), "object") if isinstance(inner, type) else "object"
    unit = _unit(name) if dtype.lower() in ("int64", "float64") else ""
    return [Column(name, dtype, unit, _meanings(kind).get(name, ""), _getter(name))]


def _getter(name: str) -> Callable[[Any], Any]:
    return lambda row: getattr(row, name)


def _inside(name: str, column: Column) -> Callable[[Any], Any]:
    def get(row: Any) -> Any:
        inner = getattr(row, name)
        return None if inner is None else column.get(inner)

    return get


def _nullable(dtype: str) -> str:
    return {"int64": "Int64", "bool": "boolean"}.get(dtype, dtype)


def _without_none(hint: Any) -> tuple[Any, bool]:
    """(the type but for None, whether it may be None); a choice of several types is an object."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    others = [part for part in typing.get_args(hint) if part is not type(None)]
    return (others[0] if len(others) == 1 else object), len(others) < len(typing.get_args(hint))


def _unit(name: str) -> str:
    return next((unit for pattern, unit in _UNITS if pattern.search(name)), "")


@cache
def _meanings(kind: type) -> dict[str, str]:
    """Field -> the string that stands below it in the source; nothing where the source is not to be had."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, SyntaxError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
