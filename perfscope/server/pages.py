"""As much of an answer as one message may hold, and a cursor for the rest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from perfscope.errors import UnusableInput
from perfscope.frozen import dataclass

LEAST_CHARACTERS: Final = 4_000
"""Below this a single finding with its code would not fit."""
DEFAULT_CHARACTERS: Final = 12_000
"""About 3,000 tokens: an agent can ask a dozen questions without filling its context."""

_SHORTENED: Final = "The answer was too long: its longest texts end in …, and its longest lists are cut."
_MARK: Final = "…"
_ROWS, _NEXT, _TOTAL, _NOTES = "rows", "next_cursor", "total", "notes"
_SHORTEST: Final = 40
"""Characters that a shortened text keeps at least."""


@dataclass(frozen=True)
class Question:
    """A call: the tool, its arguments without the cursor, and the state of what it is about."""

    tool: str
    arguments: Mapping[str, Any]
    state: str

    def cursor(self, offset: int) -> str:
        """Where the rows from ``offset`` on begin."""
        return f"{offset}.{self._digest()}"

    def offset(self, cursor: str | None) -> int:
        """The row at which a page begins. Raises UnusableInput for a cursor of another question."""
        if cursor is None:
            return 0
        number, _, digest = cursor.partition(".")
        if digest != self._digest() or not number.isdecimal():
            raise UnusableInput(
                f"{cursor}: is no cursor of this question. Give next_cursor of the answer before with the same "
                "arguments, or ask again without cursor: where the recording has changed, old cursors end"
            )
        return int(number)

    def _digest(self) -> str:
        asked = json.dumps([self.tool, dict(self.arguments), self.state], sort_keys=True, default=str)
        return hashlib.blake2b(asked.encode(), digest_size=6).hexdigest()


def text_of(document: Any) -> str:
    """An answer's JSON as it is sent."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


@dataclass(frozen=True, kw_only=True)
class Room:
    """How much an answer may hold: characters of JSON, and rows (None: as many as fit)."""

    characters: int
    rows: int | None = None


def page(
    fixed: Mapping[str, Any],
    rows: Sequence[Any],
    to_json: Callable[[Any], Any],
    question: Question,
    cursor: str | None,
    most: Room,
) -> dict[str, Any]:
    """``fixed`` and as many of ``rows`` from the cursor on as there is room for, at least one.

    ``to_json`` makes a row's JSON. The answer has ``total`` (rows in all), ``rows`` and ``next_cursor`` (None: these
    were the last) beside what is fixed. A row too long for an answer is shortened, and ``notes`` say so.
    """
    offset, limit = question.offset(cursor), most.characters
    found: dict[str, Any] = {**fixed, _TOTAL: len(rows), _ROWS: [], _NEXT: question.cursor(len(rows))}
    found, shortened = fitted(found, limit - limit // 3)
    room = limit - len(text_of(found)) - len(_SHORTENED) - 3
    shown: list[Any] = []
    for row in rows[offset : None if most.rows is None else offset + most.rows]:
        document = to_json(row)
        size = len(text_of(document)) + 1
        if size > room and not shown:
            document, _ = fitted(document, room - 1)
            size, shortened = len(text_of(document)) + 1, True
        if size > room:
            break
        shown.append(document)
        room -= size
    after = offset + len(shown)
    found |= {_ROWS: shown, _NEXT: question.cursor(after) if after < len(rows) else None}
    return _noted(found) if shortened else found


def whole(fixed: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """An answer without rows, in at most ``limit`` characters."""
    found, shortened = fitted(dict(fixed), limit - len(_SHORTENED) - 3)
    return _noted(found) if shortened else found


def fitted(document: Any, limit: int) -> tuple[Any, bool]:
    """A document in at most ``limit`` characters, and whether texts or lists in it had to be shortened for that."""
    longest, shortened = limit // 2, False
    while len(text_of(document)) > limit and longest >= _SHORTEST // 2:
        document, shortened, longest = _shortened(document, max(longest, _SHORTEST)), True, longest // 2
    return document, shortened


def _noted(document: dict[str, Any]) -> dict[str, Any]:
    return {**document, _NOTES: [*document.get(_NOTES, ()), _SHORTENED]}


def _shortened(value: Any, longest: int) -> Any:
    """``value`` with no text and no list longer than ``longest`` characters."""
    if isinstance(value, str):
        return value if len(value) <= longest else f"{value[: longest - 1]}{_MARK}"
    if isinstance(value, dict):
        return {key: _shortened(each, longest) for key, each in value.items()}
    if isinstance(value, list):
        return _list(value, longest)
    return value


def _list(values: Iterable[Any], longest: int) -> list[Any]:
    shown: list[Any] = []
    for value in values:
        value = _shortened(value, longest)
        longest -= len(text_of(value)) + 1
        if longest < 0 and shown:
            break
        shown.append(value)
    return shown
