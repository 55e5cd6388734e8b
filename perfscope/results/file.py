"""Reads a summary back that ``perfscope analyze --json`` (or ``Summary.to_dict``) wrote."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from perfscope.errors import UnusableInput
from perfscope.results.summary import SCHEMA, Summary


def load_summary(path: str | Path) -> Summary:
    """Read the JSON that ``perfscope analyze --json`` wrote, or the one inside a page that it wrote.

    Raises UnusableInput naming the file and what is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        document = _inside_page(text) if text.startswith("<!DOCTYPE html>") else json.loads(text)
    except OSError as error:
        raise UnusableInput(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UnusableInput(
            f"{path}: is not JSON ({error}); write it with perfscope analyze TRACES --json {path}"
        ) from error
    try:
        return summary_from_dict(document)
    except UnusableInput as error:
        raise UnusableInput(f"{path}: {error}") from error


def embedded(summary: Summary) -> str:
    """The summary as a page holds it for programs: JSON whose ``packed`` is that of ``to_dict``, gzip in base64."""
    content = json.dumps(summary.to_dict(), separators=(",", ":")).encode("ascii")
    packed = base64.b64encode(gzip.compress(content, 6, mtime=0)).decode("ascii")
    return json.dumps({"schema": SCHEMA, "packed": packed})


def _inside_page(html: str) -> Any:
    """The document that ``embedded`` put into a page. Raises ValueError where there is none."""
    found = re.search(r'<script type="application/json" id="summary">([^<]*)</script>', html)
    if found is None:
        raise ValueError("the page holds no summary")
    try:
        return json.loads(gzip.decompress(base64.b64decode(json.loads(found[1])["packed"])))
    except (EOFError, OSError, KeyError, TypeError) as error:
        raise ValueError("the page's summary is damaged") from error


def summary_from_dict(document: Any) -> Summary:
    """The summary that ``Summary.to_dict`` made the document of; keys of later versions are ignored.

    Raises UnusableInput where the document is of another schema, or where a key is missing or holds something else.
    """
    found = document.get("schema") if isinstance(document, Mapping) else type(document).__name__
    if found != SCHEMA:
        raise UnusableInput(
            f"expected {SCHEMA!r}, found {found!r}; write it again with perfscope analyze TRACES --json FILE"
        )
    values = {**document, "findings": _with_fields_of_actions(document.get("findings"))}
    try:
        # Keys of a JSON object are text: ranks among them are numbers all the same.
        return msgspec.convert(values, Summary, str_keys=True)
    except msgspec.ValidationError as error:
        raise UnusableInput(f"is no summary of schema {SCHEMA!r}: {error}") from error


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
