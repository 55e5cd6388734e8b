"""Reads a summary back that ``perfscope analyze --json`` (or ``Summary.to_dict``) wrote."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from isal import igzip

from perfscope.errors import UnusableInput
from perfscope.results import sound
from perfscope.results.summary import SCHEMA, Summary
from perfscope.typed import WrongValue, check, plain, read_bytes, read_json

_LARGEST_FILE: Final = 512 << 20
"""Bytes, of a page's summary unpacked: ten times one of 10,000 ranks."""

_LEVEL: Final = 3
"""The highest of isal: plotly's script is 6 % larger than at zlib's level 4, in a quarter of its time."""

_MODEL: Final = {
    "model.name": str,
    "model.parameters": int,
    "model.parameter_bytes": int,
    "model.dtypes": tuple[str, ...],
}
"""The kinds of what is shown of a job's model, by path."""


def load_summary(path: str | Path) -> Summary:
    """Read the JSON that ``perfscope analyze --json`` wrote, or the one inside a page that it wrote.

    Raises UnusableInput naming the file and what is wrong.
    """
    try:
        data = read_bytes(Path(path), _LARGEST_FILE)
    except ValueError as error:
        raise UnusableInput(f"{path}: {error}") from error
    try:
        document = read_json(_inside_page(data) if data.startswith(b"<!DOCTYPE html>") else data)
    except ValueError as error:
        raise UnusableInput(f"{path}: {error}; write it with perfscope analyze TRACES --json {path}") from error
    try:
        return summary_from_dict(document)
    except UnusableInput as error:
        raise UnusableInput(f"{path}: {error}") from error


def embedded(summary: Summary) -> str:
    """The summary as a page holds it for programs: JSON whose ``packed`` is that of ``to_dict``, gzip in base64."""
    return json.dumps({"schema": SCHEMA, "packed": packed(compact_json(summary.to_dict()))})


def compact_json(value: Any) -> bytes:
    """JSON without spaces, in UTF-8; what is no number is null, as browsers cannot read it."""
    try:
        return msgspec.json.encode(value, enc_hook=float)  # numpy's are numbers of a kind of their own
    except UnicodeEncodeError:  # half a surrogate pair, as names in a trace may have
        return json.dumps(value, separators=(",", ":")).encode("ascii")


def packed(content: bytes) -> str:
    """Gzip in base64, the same for the same content."""
    return base64.b64encode(igzip.compress(content, _LEVEL, mtime=0)).decode("ascii")


def _inside_page(html: bytes) -> bytes:
    """The JSON that ``embedded`` put into a page. Raises ValueError where there is none."""
    found = re.search(rb'<script type="application/json" id="summary">([^<]*)</script>', html)
    if found is None:
        raise ValueError("is a page that holds no summary")
    unpack = zlib.decompressobj(wbits=31)
    try:
        document = unpack.decompress(base64.b64decode(read_json(found[1])["packed"]), _LARGEST_FILE)
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise ValueError("is a page whose summary is damaged") from error
    if not unpack.eof:
        raise ValueError("is a page whose summary is cut or larger than a summary can be")
    return document


def summary_from_dict(document: Any) -> Summary:
    """The summary that ``Summary.to_dict`` made the document of; keys of later versions are ignored.

    Raises UnusableInput where the document is of another schema, or where a key is missing or holds something else.
    """
    found = document.get("schema") if isinstance(document, Mapping) else type(document).__name__
    if found != SCHEMA:
        raise UnusableInput(
            f"expected {SCHEMA!r}, found {found!r}; write it again with perfscope analyze TRACES --json FILE"
        )
    try:
        values = plain({**document, "findings": _with_fields_of_actions(document.get("findings"))})
        if isinstance(values.get("job"), dict):
            check(values["job"], _MODEL, [], "job.")
        # Keys of a JSON object are text: ranks among them are numbers all the same.
        summary = msgspec.convert(values, Summary, str_keys=True)
        sound.check(summary)
    except (msgspec.ValidationError, ValueError, WrongValue) as error:  # msgspec's is a ValueError from 0.21 on
        raise UnusableInput(f"is no summary of schema {SCHEMA!r}: {error}") from error
    return summary


def _with_fields_of_actions(findings: Any) -> Any:
    """The findings with their actions' ``from`` and ``to``, Python keywords as names, under their fields' names."""
    if not isinstance(findings, (list, tuple)):
        return findings
    return [
        {**finding, "action": _with_fields(finding.get("action"))} if isinstance(finding, Mapping) else finding
        for finding in findings
    ]


def _with_fields(action: Any) -> Any:
    if not isinstance(action, Mapping):
        return action
    return {**action, "old": action.get("from"), "new": action.get("to")}
