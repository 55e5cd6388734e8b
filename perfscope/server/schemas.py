"""Answers as JSON, and the JSON Schema of each: both follow the fields of the dataclasses.

Numbers have six significant digits, what is not finite is null, and ranks and steps are ranges in words (``0-3, 7``):
a thousand ranks would fill an answer.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from perfscope.results.columns import Column
from perfscope.results.fields import Field, classes_of, fields_of
from perfscope.text import rank_list

_MOST_RANGES: Final = 100
_MOST_WHOLE: Final = 1e15
"""Larger numbers are written with an exponent."""
_RANGES: Final = re.compile(r"(?:^|_)(?:ranks|steps)(?:$|_)|waits_for")
"""Names of fields that hold ranks or steps."""
_AS_RANGES: Final = "As ranges: `0-3, 7`."


def as_json(value: Any, *, ranges: bool = False) -> Any:
    """A value of an answer as JSON; ``ranges``: it is a list of ranks or steps."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float):
        return _number(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = fields_of(type(value))
        return {
            name: as_json(getattr(value, name), ranges=_is_ranges(name, field.type)) for name, field in fields.items()
        }
    if isinstance(value, Mapping):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return rank_list(value, limit=_MOST_RANGES) if ranges else [as_json(each) for each in value]
    return value


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < _MOST_WHOLE else short


def row_as_json(columns: tuple[Column, ...], row: Any) -> dict[str, Any]:
    """A row of a table as JSON."""
    return {
        column.name: as_json(column.get(row), ranges=_is_ranges(column.name, column.type)) for column in columns
    }  # fmt: skip


def schema_of(kind: type) -> dict[str, Any]:
    """The JSON Schema of a dataclass as ``as_json`` writes it, with the definition and the unit of each field."""
    schema = msgspec.json.schema(kind)
    definitions: dict[str, Any] = schema["$defs"]
    for each in classes_of(kind):
        defined = definitions[each.__name__]
        defined.pop("title", None)
        defined.pop("description", None)
        # Every field is written, also where it has a default.
        defined["required"] = [field.name for field in dataclasses.fields(each)]
        for field in fields_of(each).values():
            defined["properties"][field.name] = _described(field, defined["properties"][field.name])
    root = definitions.pop(kind.__name__)
    return {**root, "$defs": definitions} if definitions else root


def schema_of_row(columns: tuple[Column, ...]) -> dict[str, Any]:
    """The JSON Schema of a row of a table."""
    properties = {
        column.name: _stated(
            _nullable(str if _is_ranges(column.name, column.type) else column.type),
            column.meaning,
            column.unit,
            ranges=_is_ranges(column.name, column.type),
        )
        for column in columns
    }
    return {"type": "object", "properties": properties, "required": list(properties)}


def _described(field: Field, found: dict[str, Any]) -> dict[str, Any]:
    ranges = _is_ranges(field.name, field.type)
    found = {key: value for key, value in found.items() if key != "default"}
    return _stated({"type": "string"} if ranges else found, field.meaning, field.unit, ranges=ranges)


def _stated(schema: dict[str, Any], meaning: str, unit: str, *, ranges: bool) -> dict[str, Any]:
    words = " ".join(part for part in (meaning.replace("``", "`"), _AS_RANGES if ranges else "") if part)
    stated = {"description": words, "unit": unit}
    return {**schema, **{key: text for key, text in stated.items() if text}}


def _is_ranges(name: str, kind: Any) -> bool:
    return bool(_RANGES.search(name)) and kind == tuple[int, ...]


def _nullable(kind: Any) -> dict[str, Any]:
    """The schema of a column's values, which may be missing in any; empty where they are of several types."""
    found: dict[str, Any] = {} if kind is object else msgspec.json.schema(kind)
    if "type" not in found:
        return {}
    return {**{key: value for key, value in found.items() if key != "$defs"}, "type": [found["type"], "null"]}
