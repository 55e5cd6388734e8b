"""Documents in JSON follow their schemas, and every key has a definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from perfscope.cli.schema import SCHEMAS
from tests.reports.examples import EXAMPLES
from tests.schemas import follows

SAMPLES = ["healthy", "slow_rank", "starved"]


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_is_a_schema(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name][1]())


def test_every_key_of_a_result_has_a_definition() -> None:
    """Those of metadata and of the answers; the summary's are held by tests of its own."""
    undefined = [
        f"{name}: {kind}.{key}"
        for name in ("whatif", "sweep", "tune", "doctor")
        for kind, defined in SCHEMAS[name][1]()["$defs"].items()
        for key, of in defined["properties"].items()
        if not of.get("description") and key not in ("schema", "perfscope_version", "command", "kept")
        and "$ref" not in str(of)
    ]  # fmt: skip
    assert undefined == []


def test_metadata_is_described_by_the_docstrings_below_its_fields() -> None:
    described = SCHEMAS["run"][1]()["$defs"]
    assert described["RunMetadata"]["properties"]["started_at"]["description"] == "ISO 8601, UTC."
    assert "elements" in described["ModelMetadata"]["properties"]["parameters"]["description"].lower()
    assert described["DeviceMetadata"]["properties"]["peak_bytes"]["description"].endswith("(CPU).")


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_of_summaries(example: str) -> None:
    document = json.loads(json.dumps(EXAMPLES[example]().to_dict()))
    follows("summary", document)
    for part in ("hang", "history"):
        if document[part] is not None:
            follows(part, document[part])


@pytest.mark.parametrize("sample", SAMPLES)
def test_metadata_of_the_samples(samples: Path, sample: str) -> None:
    files = [("launch", samples / sample / "perfscope.json")]
    files += [("run", path) for path in (samples / sample).glob("rank-*.run.json")]
    assert len(files) > 2
    for name, path in files:
        follows(name, json.loads(path.read_text(encoding="utf-8")), whole=False)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("whatif", {"schema": "perfscope.whatif/1"}),
        ("doctor", {"schema": "perfscope.doctor/2"}),
        ("run", {"schema": "perfscope.run/1", "rank": "one"}),
        ("samples", {"schema": "perfscope.samples/1", "host": 1}),
        ("samples", [1, [], []]),
    ],
)
def test_what_does_not_follow_is_refused(name: str, wrong: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMAS[name][1]())
