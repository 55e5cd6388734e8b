"""Turns frameworks' settings into plain JSON values, spelled as the user writes them, secrets left out."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any, Final

from perfscope.redact import redact_settings

DEPTH: Final = 8
"""Levels of nesting kept; DeepSpeed's configuration has five."""

MOST: Final = 200
"""Entries kept of one list or mapping: settings are few, and what has more is data."""


def settings_of(thing: Any, names: Iterable[str]) -> dict[str, Any]:
    """The attributes ``names`` of an object that it has and that are not None, as plain values without secrets.

    The names themselves are ours and known to be harmless, even where one speaks of tokens.
    """
    values = {name: getattr(thing, name, None) for name in names}
    return {name: redact_settings(plain(value)) for name, value in values.items() if value is not None}


def clean(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The user's own mapping of settings as plain JSON values without secrets."""
    redacted: dict[str, Any] = redact_settings(plain(settings))
    return redacted


def plain(value: Any, depth: int = DEPTH) -> Any:
    """A value as JSON holds it: enumerations and types by the name that a user writes, other objects by their class."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return _member(value)
    if isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)  # infinity and not-a-number are not JSON
    if isinstance(value, PurePath):
        return str(value)
    return _container(value, depth) if depth else f"<{type(value).__name__}>"


def _member(value: enum.Enum) -> str | int:
    """``steps`` for ``IntervalStrategy.STEPS``, 2 for ``ZeroStageEnum(2)``, ``FULL_SHARD`` for a mere name."""
    if isinstance(value.value, str):
        return value.value
    return int(value) if isinstance(value, int) else value.name


def _container(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        return {str(key): plain(each, depth - 1) for key, each in list(value.items())[:MOST]}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each, depth - 1) for each in list(value)[:MOST]]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [entry.name for entry in dataclasses.fields(value)]
        return {name: plain(getattr(value, name, None), depth - 1) for name in fields}
    if isinstance(value, functools.partial):
        return plain(value.func, depth)
    if type(value).__module__ == "torch":  # torch.float32 and its like
        return str(value).removeprefix("torch.")
    return str(getattr(value, "__name__", "")) or f"<{type(value).__name__}>"
