"""Repairs one event that is not valid JSON, or valid JSON with other types than those of a trace.

Some tools write names into the file without escaping them. Real traces have: bare ``NaN``, ``Infinity`` and ``inf``,
lone backslashes, quotes that are not escaped, control characters, bytes that are not UTF-8, half surrogates.
"""

from __future__ import annotations

import json
import re
from itertools import islice

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What the decoder raises on unreadable input: invalid JSON, types or UTF-8, endless nesting."""

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

_EVENT_KEYS = rb"ph|name|cat|pid|tid|ts|dur|args|id|bp|s|sf|tts|tdur|cname|stack"
BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{\s*\"(?:" + _EVENT_KEYS + rb")\"\s*:)")
"""Between two events. Kernel names contain ``}, {`` too, but no event key in quotes."""
_ARRAY_END = re.compile(rb"\}[\s,]*(?=\](?:\s*\}|\s*,\s*\"|\s*$))")
ENOUGH_BYTES = 4 << 20
"""An event that does not end within this is damaged, not long."""
_ENDS_TRIED = 3
"""How many boundaries an event in need of repair may span."""
_BOUNDARIES_SEEN = 200
_EVENT_FOLLOWS = re.compile(rb'\s*,\s*\{[^{}]*"(?:ph|ts)"\s*:[^{}]*"(?:ph|ts)"\s*:')
"""A boundary with more than a nested object's keys after it."""

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


def repaired(piece: bytes) -> bytes:
    """The text of one event as valid JSON, as far as that can be decided; other text is left as it is."""
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


def possible_ends(text: bytes, at: int, limit: int, *, last: bool) -> list[int]:
    """Where the damaged event at ``at`` may end, likeliest first; empty where more text is needed to decide.

    Objects nested in its arguments look like events, so boundaries at which its brackets are closed come first.
    """
    boundaries = [match.start() + 1 for match in islice(BOUNDARY.finditer(text, at, limit), _BOUNDARIES_SEEN)]
    if last and len(boundaries) < _BOUNDARIES_SEEN and (match := _ARRAY_END.search(text, at, limit)):
        boundaries.append(match.start() + 1)
    if not boundaries:
        return []
    boundaries.sort()
    if closed := _ends_of_object(text, at, boundaries):
        return closed[:_ENDS_TRIED]
    if last or len(boundaries) >= _ENDS_TRIED or limit >= ENOUGH_BYTES:
        # Where its strings end is undecidable. None of these ends: the event is cut off, and nothing follows it.
        return [end for end in boundaries if _EVENT_FOLLOWS.match(text, end, limit)][:_ENDS_TRIED]
    return []


def _ends_of_object(text: bytes, start: int, candidates: list[int]) -> list[int]:
    """Those of ``candidates`` (indices after a ``}``) at which everything opened since ``start`` is closed again.

    Brackets inside strings do not count; strings end where ``repaired`` ends them. A ``}`` closes whatever is open
    inside its object. Example: of ``{"a": [{}, {}, 1}, {`` only the index after the last ``}`` is one.
    """
    piece = text[start : candidates[-1]].decode("latin-1")  # one character per byte
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
            # It escapes nothing, or ends a Windows path: the writer escaped no backslash.
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
    except UNREADABLE:
        return piece
    return _joined(kept)


_STRINGS = ("cat", "name")
_IDS = ("pid", "tid", "ts", "dur", "External id", "external id", "correlation", "device", "stream", "step_num")
_IDS_OF_MEMORY = ("Total Allocated", "Total Reserved", "Device Id", "Device Type")


def _usable(key: str, raw: bytes) -> bytes | None:
    """A field's JSON text, with a type that its key may have; None to leave it out."""
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
    """The phase of an event: empty for an empty object, None where it has none or is no object."""
    try:
        fields = _FIELDS.decode(piece)
        if not fields:
            return ""
        phase = msgspec.json.decode(fields["ph"])
    except (*UNREADABLE, KeyError):
        return None
    return phase if isinstance(phase, str) else None
