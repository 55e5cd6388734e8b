"""Values from a JSON file made into dataclasses: each has the type that its field declares, or the field's default.

The one place where files that anybody may have written are checked, so that nobody checks again further in. Standard
library only: collectors read metadata inside the training job.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

_LARGEST: Final = 2**63 - 1

MOST_RANKS: Final = 1 << 20
"""Of one job: ten times the largest there is. Tables with a row for each of more would fill the memory."""

SIGNED: Final = {"least": -_LARGEST}
POSITIVE: Final = {"least": 1}
RANK: Final = {"most": MOST_RANKS - 1}
WORLD: Final = {"least": 1, "most": MOST_RANKS}
"""Metadata of a field with the least and the most of its numbers; 0 and a number of 64 bits for all others."""

_Bounds = tuple[int, int]
"""Least and most of a field's numbers."""
_ANY: Final = (0, _LARGEST)

_DEEPEST: Final = 16
_MOST: Final = 1_000_000
"""Items of one list or object."""

_LONGEST_SHOWN: Final = 60
"""Characters of a wrong value in a message."""

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")

_Kind = TypeVar("_Kind")


class WrongValue(Exception):
    """A value does not fit; the text says what was expected."""


def read_json(data: bytes) -> Any:
    """The value of a JSON file's bytes. Raises ValueError with a text that says what is wrong and where."""
    try:
        return json.loads(data.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"is not whole JSON (line {error.lineno}, column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError("is not JSON in UTF-8, or nested too deep") from error


def read_bytes(path: Path, most: int) -> bytes:
    """A file's bytes, ``most`` at most. Raises ValueError with a text that says why it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
    if len(data) > most:
        raise ValueError(f"is larger than {most >> 20} MiB")
    return data


def build(kind: type[_Kind], raw: dict[str, Any], faults: list[str], within: str = "") -> _Kind:
    """``raw`` as a dataclass ``kind``: unknown keys are dropped, a value of a wrong type gives way to its default.

    ``faults`` gets a sentence for each such value, ``within`` is the path to ``raw`` in its file. Raises WrongValue
    where a field without a default is missing or wrong.
    """
    values: dict[str, Any] = {}
    for field, annotation in _fields(typing.cast(Hashable, kind)):
        if field.name not in raw:
            continue
        place = f"{within}{field.name}"
        try:
            values[field.name] = _value(annotation, raw[field.name], _bounds(field), faults, place)
        except WrongValue as error:
            faults.append(f"{place} is {_shown(raw[field.name])}, not {error}: it is left out")
    try:
        return kind(**values)
    except TypeError as error:
        raise WrongValue("a complete object") from error


def check(nested: dict[str, Any], kinds: Mapping[str, Any], faults: list[str], within: str) -> None:
    """Take out of ``nested`` objects what is not of the kind that ``kinds`` has for its dotted path."""
    for path, kind in kinds.items():
        *owners, name = path.split(".")
        owner: Any = nested
        for each in owners:
            owner = owner.get(each) if isinstance(owner, dict) else None
        if isinstance(owner, dict) and owner.get(name) is not None:
            try:
                _value(kind, owner[name], _ANY, faults, path)
            except WrongValue as error:
                faults.append(f"{within}{path} is {_shown(owner.pop(name))}, not {error}: it is left out")


def _bounds(field: dataclasses.Field[Any]) -> _Bounds:
    return field.metadata.get("least", 0), field.metadata.get("most", _LARGEST)


@functools.cache
def _fields(kind: Any) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    hints = typing.get_type_hints(kind)
    return tuple((field, hints[field.name]) for field in dataclasses.fields(kind))


def _value(annotation: Any, raw: Any, bounds: _Bounds, faults: list[str], place: str) -> Any:
    if annotation is Any:
        return plain(raw)
    if dataclasses.is_dataclass(annotation):
        if not isinstance(raw, dict):
            raise WrongValue("an object")
        return build(typing.cast("type[Any]", annotation), raw, faults, f"{place}.")
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is types.UnionType:
        (kind,) = (each for each in inner if each is not types.NoneType)
        return None if raw is None else _value(kind, raw, bounds, faults, place)
    if origin is tuple:
        return _items(inner[0], raw, bounds, faults, place)
    if origin is dict:
        if not isinstance(raw, dict) or len(raw) > _MOST:
            raise WrongValue("an object")
        return {clean(key): _value(inner[1], item, bounds, faults, f"{place}.{key}") for key, item in raw.items()}
    return _scalar(annotation, raw, bounds)


def _items(kind: Any, raw: Any, bounds: _Bounds, faults: list[str], place: str) -> tuple[Any, ...]:
    """A list. Of objects those that do not fit are left out; one wrong number makes a list of numbers useless."""
    if not isinstance(raw, list) or len(raw) > _MOST:
        raise WrongValue("a list")
    if not dataclasses.is_dataclass(kind):
        return tuple(_value(kind, item, bounds, faults, place) for item in raw)
    items: list[Any] = []
    for number, item in enumerate(raw):
        try:
            items.append(_value(kind, item, bounds, faults, f"{place}[{number}]"))
        except WrongValue as error:
            faults.append(f"{place}[{number}] is {_shown(item)}, not {error}: it is left out")
    return tuple(items)


def _scalar(kind: Any, raw: Any, bounds: _Bounds) -> Any:
    if kind is str and isinstance(raw, str):
        return clean(raw)
    if kind is bool and isinstance(raw, bool):
        return raw
    is_number = isinstance(raw, (int, float) if kind is float else int) and not isinstance(raw, bool)
    # NaN is not between any two numbers.
    least, most = bounds
    if kind in (int, float) and is_number and least <= raw <= most:
        return raw
    names = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
    if kind in (str, bool) or least < 0:
        raise WrongValue(names[kind])
    raise WrongValue(f"{names[kind]} from {least} {'on' if most == _LARGEST else f'to {most}'}")


def clean(raw: str) -> str:
    """A text without control characters, and without halves of characters that no file can be written with."""
    return _CONTROL.sub("\ufffd", raw)


def plain(raw: Any, depth: int = 0) -> Any:
    """A JSON value of any kind, its numbers finite and of at most 64 bits, its texts clean. Raises WrongValue."""
    if isinstance(raw, str):
        return clean(raw)
    if isinstance(raw, (int, float)):
        if not -_LARGEST <= raw <= _LARGEST:
            raise WrongValue("a number of 64 bits")
        return raw
    if raw is None:
        return None
    if depth >= _DEEPEST or len(raw) > _MOST:
        raise WrongValue(f"nested at most {_DEEPEST} deep")
    if isinstance(raw, dict):
        return {clean(str(key)): plain(item, depth + 1) for key, item in raw.items()}
    return [plain(item, depth + 1) for item in raw]


def _shown(raw: Any) -> str:
    """A value in a few words."""
    if isinstance(raw, (dict, list)):
        return "an object" if isinstance(raw, dict) else "a list"
    shown = clean(repr(raw)) if not isinstance(raw, int) or abs(raw) <= _LARGEST else "a number of more than 64 bits"
    return shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}…"
