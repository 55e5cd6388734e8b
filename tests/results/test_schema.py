"""The JSON Schema: what is written follows it, and every key of it is defined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import perfscope
from perfscope.results.schema import json_schema
from perfscope.results.summary import Summary
from tests.reports.examples import EXAMPLES


def _check(summary: Summary) -> None:
    jsonschema.Draft202012Validator(json_schema()).validate(json.loads(json.dumps(summary.to_dict())))


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_follow_it(example: str) -> None:
    _check(EXAMPLES[example]())


@pytest.mark.parametrize("sample", ["healthy", "slow_rank", "starved"])
def test_the_samples_follow_it(samples: Path, sample: str) -> None:
    _check(perfscope.analyze(samples / sample))


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
