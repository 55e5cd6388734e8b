"""JSON Schemas (2020-12) of what is written and printed as JSON, made from the classes that it is made from.

``perfscope schema NAME`` prints one; ``perfscope/cli/schema.py`` lists them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import msgspec

from perfscope.results.fields import classes_of, fields_of
from perfscope.results.summary import SCHEMA, Summary

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
ADDRESS: Final = "https://perfscope.github.io/perfscope/schemas/"
"""Where the schemas are published: its name and ``.json`` make each schema's ``$id``."""

JSON_NAMES: Final = {"old": "from", "new": "to"}
"""Fields of actions and of tuned settings whose key in JSON is a Python keyword."""


def json_schema() -> dict[str, Any]:
    """The schema of the summary, with the definition of each key as its ``description``, and its ``unit``."""
    return schema_of(Summary, "summary", SCHEMA, renamed=("Action",))


def schema_of(
    kind: type, name: str, version: str, *, renamed: tuple[str, ...] = (), more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The schema of the document that a dataclass is written as.

    Args:
        kind: The dataclass.
        name: The schema's name, which makes its ``$id``.
        version: What the document's key ``schema`` says, such as ``perfscope.summary/1``; empty where it has none.
        renamed: Names of classes whose fields ``old`` and ``new`` are ``from`` and ``to`` in JSON.
        more: Keys that the document has besides the class's fields, all of them always; name -> schema.
    """
    made = msgspec.json.schema(kind)
    for each in classes_of(kind):
        _describe(made["$defs"][each.__name__], each)
    for each_name in renamed:
        _rename(made["$defs"][each_name])
    top = made["$defs"][kind.__name__]
    stated = {**({"schema": {"const": version}} if version else {}), **(more or {})}
    top["properties"] = {**stated, **{key: of for key, of in top["properties"].items() if key not in stated}}
    top["required"] = [*stated, *(key for key in top["required"] if key not in stated)]
    return {"$schema": DIALECT, "$id": f"{ADDRESS}{name}.json", **made}


def _describe(defined: dict[str, Any], kind: type) -> None:
    """Give each key its definition and unit, from the field's annotation or the docstring below it."""
    docstrings = _attribute_docstrings(kind)
    for name, field in fields_of(kind).items():
        meaning = docstrings.get(name) or field.meaning
        stated = {"description": meaning.replace("``", "`"), "unit": field.unit}
        defined["properties"][name] |= {key: text for key, text in stated.items() if text}


@cache
def _attribute_docstrings(kind: type) -> dict[str, str]:
    """Name -> the text below the field in the source; classes of ``perfscope.recording`` are described that way."""
    (tree,) = ast.parse(inspect.cleandoc(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for statement, after in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            found[statement.target.id] = " ".join(str(after.value.value).split())
    return {name: found[name] for name in found if name in {field.name for field in dataclasses.fields(kind)}}


def _rename(defined: dict[str, Any]) -> None:
    for python, key in JSON_NAMES.items():
        defined["properties"][key] = defined["properties"].pop(python)
        defined["required"] = [key if each == python else each for each in defined["required"]]
