"""Holds documents to the JSON Schemas: every key is defined, and of what this version writes, none is missing."""

from __future__ import annotations

import copy
import functools
from typing import Any

import jsonschema

from perfscope.cli.schema import SCHEMAS


@functools.cache
def _validator(name: str, whole: bool) -> jsonschema.Draft202012Validator:
    schema = copy.deepcopy(SCHEMAS[name][1]())
    for defined in schema["$defs"].values():
        if defined.get("properties"):
            defined["additionalProperties"] = False
            if whole:
                defined["required"] = list(defined["properties"])
    return jsonschema.Draft202012Validator(schema)


def follows(name: str, document: Any, *, whole: bool = True) -> None:
    """Raise ValidationError where the document does not follow a schema.

    Published schemas allow further keys, which a later version may write; here none is allowed. ``whole``: this version
    wrote the document, so it has every key.
    """
    _validator(name, whole).validate(document)
