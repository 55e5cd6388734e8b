"""The summary's JSON Schema: what is missing or of another type does not follow it, and its keys are defined."""

from __future__ import annotations

from typing import Any

import jsonschema

from perfscope.results.schema import json_schema
from tests.reports.examples import EXAMPLES


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())


def test_a_key_that_is_missing_or_of_another_type_does_not_follow_it() -> None:
    document = next(iter(EXAMPLES.values()))().to_dict()
    validator = jsonschema.Draft202012Validator(json_schema())
    for wrong in ({**document, "schema": "other"}, {**document, "clock": "none"}, {**document, "job": None}):
        assert not validator.is_valid(wrong)
    del document["job"]
    assert not validator.is_valid(document)


def test_keys_have_their_definition_and_their_unit() -> None:
    definitions: dict[str, Any] = json_schema()["$defs"]
    wait = definitions["CollectiveRow"]["properties"]["wait_us"]
    assert wait["unit"] == "µs"
    assert wait["description"].startswith("Last arrival − own arrival")
    assert list(definitions["Action"]["properties"])[-2:] == ["from", "to"]
    assert "late rank" in definitions["TimeBreakdown"]["properties"]["exposed_comm_wait_us"]["description"]
