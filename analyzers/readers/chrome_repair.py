"""Mending one event that is not valid JSON, or valid JSON of other types than those a trace uses.

Writers copy names into the file as they are, so what is reported of real traces is: bare ``NaN``, ``Infinity`` and
``inf``, lone backslashes, quotes that are not escaped, control characters, bytes that are not UTF-8, half surrogates.
"""

from __future__ import annotations

import json
import re

import msgspec

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_HALF_SURROGATE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u....)\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_KEY_END = re.compile(r"\s*:")
_VALUE_END_IN_OBJECT = re.compile(r'\s*(?:,\s*"(?:[^"\\]|\\.){1,80}"\s*:|\}\s*(?:[,}\]]|$))')
_VALUE_END_IN_ARRAY = re.compile(r'\s*(?:\]|,\s*["\[{\-0-9tfn])')
_BARE_WORD = re.compile(r"[-+]?[A-Za-z][\w.]*(?:\([\w.]*\))?")
_JSON_WORDS = ("true", "false", "null")


def mended(piece: bytes) -> bytes:
    """The text of one event as valid JSON, as far as that can be told; undecided text is left as it is."""
    text = piece.decode("utf-8", "replace")
    out: list[str] = []
    nesting: list[str] = []
    expects_key = False
    at = 0
    while at < len(text):
        char = text[at]
        if char == '"':
            ending = _KEY_END if expects_key else _value_ending(nesting)
            string, at = _string(text, at + 1, ending)
            out.append(string)
            continue
        if word := _BARE_WORD.match(text, at) if char.isalpha() or char in "+-" else None:
            out.append(word[0] if word[0] in _JSON_WORDS else "null")
            at = word.end()
            continue
        if char in "{[":
            nesting.append(char)
        elif char in "}]" and nesting:
            nesting.pop()
        if char in "{,":
            expects_key = bool(nesting) and nesting[-1] == "{"
        elif char in "[:":
            expects_key = False
        out.append(char)
        at += 1
    return "".join(out).encode()


def ends_of_object(text: bytes, start: int, candidates: list[int]) -> list[int]:
    """Those of ``candidates``, indices after a ``}``, at which all that was opened since ``start`` is closed again.

    Brackets inside strings do not count, where strings end is told as ``mended`` does; a ``}`` closes what was left
    open inside its object. Example: of ``{"a": [{}, {}, 1}, {`` only the index after the last ``}`` is one.
    """
    piece = text[start : candidates[-1]].decode("latin-1")  # a character a byte
    wanted = set(candidates)
    found: list[int] = []
    nesting: list[str] = []
    expects_key = False
    at = 0
    while at < len(piece):
        char = piece[at]
        if char == '"':
            at = _string(piece, at + 1, _KEY_END if expects_key else _value_ending(nesting))[1]
            continue
        at += 1
        if char in "{[":
            nesting.append(char)
        elif char == "}":
            while nesting and nesting.pop() != "{":
                pass
            if not nesting and start + at in wanted:
                found.append(start + at)
        elif char == "]" and nesting and nesting[-1] == "[":
            nesting.pop()
        if char in "{,":
            expects_key = bool(nesting) and nesting[-1] == "{"
        elif char in "[:":
            expects_key = False
    return found


def _value_ending(nesting: list[str]) -> re.Pattern[str]:
    return _VALUE_END_IN_ARRAY if nesting and nesting[-1] == "[" else _VALUE_END_IN_OBJECT


def _string(text: str, start: int, ending: re.Pattern[str], *, literal: bool = False) -> tuple[str, int]:
    """(the string that starts at ``start``, quoted again, index after it): its end is a quote that JSON can follow.

    ``literal``: its backslashes escape nothing.
    """
    out = ['"']
    at = start
    while at < len(text):
        plain = _PLAIN.match(text, at)
        assert plain is not None  # it matches the empty string
        out.append(plain[0])
        at = plain.end()
        if at == len(text):
            break
        char = text[at]
        if char == '"':
            if ending.match(text, at + 1):
                return "".join(out) + '"', at + 1
            out.append('\\"')
            at += 1
        elif char != "\\":
            out.append(f"\\u{ord(char):04x}")
            at += 1
        elif literal:
            out.append("\\\\")
            at += 1
        elif _HALF_SURROGATE.match(text, at):
            out.append("\\ufffd")
            at += 6
        else:
            escape = _ESCAPE.match(text, at)
            # One that escapes nothing, or a Windows path's last: whoever wrote it escaped none.
            if escape is None or (escape[0] == '\\"' and ending.match(text, at + 2)):
                return _string(text, start, ending, literal=True)
            out.append(escape[0])
            at = escape.end()
    return "".join(out), at


def normalized(piece: bytes) -> bytes:
    """A well-formed event with the types the reader decodes: a name of any kind as a string, unusable values left out.

    Returned as it is where it is not a JSON object.
    """
    try:
        fields = _FIELDS.decode(piece)
        kept = {key: value for key, raw in fields.items() if (value := _usable(key, bytes(raw))) is not None}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return piece
    return _joined(kept)


_STRINGS = ("cat", "name")
_IDS = ("pid", "tid", "ts", "dur", "External id", "external id", "correlation", "device", "stream", "step_num")
_IDS_OF_MEMORY = ("Total Allocated", "Total Reserved", "Device Id", "Device Type")


def _usable(key: str, raw: bytes) -> bytes | None:
    """A field's JSON text with a type that its key may have; None to leave it out."""
    start = raw[:1]
    if key in _STRINGS:
        return raw if start == b'"' else None if raw == b"null" else json.dumps(raw.decode("utf-8", "replace")).encode()
    if key in _IDS or key in _IDS_OF_MEMORY:
        return raw if start == b'"' or (start in b"-0123456789" and _is_finite(raw)) else None
    if key == "args":
        if start != b"{":
            return None
        inner = _FIELDS.decode(raw)
        return _joined(
            {name: text for name, value in inner.items() if (text := _usable_arg(name, bytes(value))) is not None}
        )
    return raw


def _usable_arg(key: str, raw: bytes) -> bytes | None:
    return _usable(key, raw) if key in _IDS or key in _IDS_OF_MEMORY else raw


def _is_finite(number: bytes) -> bool:
    return abs(float(number)) < float("inf")


def _joined(fields: dict[str, bytes]) -> bytes:
    return b"{" + b",".join(json.dumps(key).encode() + b":" + value for key, value in fields.items()) + b"}"


def phase_of(piece: bytes) -> str | None:
    """The phase of an event: empty for an empty object, None where it says none or is no object."""
    try:
        fields = _FIELDS.decode(piece)
        if not fields:
            return ""
        phase = msgspec.json.decode(fields["ph"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return None
    return phase if isinstance(phase, str) else None
