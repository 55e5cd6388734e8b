"""The JSON Schema (2020-12) of what ``perfscope analyze --json`` writes, made from the classes that it is made from."""

from __future__ import annotations

from typing import Any

import msgspec

from perfscope.results.fields import classes_of, fields_of
from perfscope.results.summary import SCHEMA, Summary


def json_schema() -> dict[str, Any]:
    """The schema, with the definition of each key as its ``description``, and its ``unit``."""
    schema: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(Summary)}
    for kind in classes_of(Summary):
        defined = schema["$defs"][kind.__name__]
        for field in fields_of(kind).values():
            stated = {"description": field.meaning.replace("``", "`"), "unit": field.unit}
            defined["properties"][field.name] |= {name: text for name, text in stated.items() if text}
    summary, action = schema["$defs"]["Summary"], schema["$defs"]["Action"]
    summary["properties"] = {"schema": {"const": SCHEMA}, **summary["properties"]}
    summary["required"] = ["schema", *summary["required"]]
    for python, name in (("old", "from"), ("new", "to")):
        action["properties"][name] = action["properties"].pop(python)
        action["required"] = [name if key == python else key for key in action["required"]]
    return schema
