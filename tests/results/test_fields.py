"""Results as JSON has them: what ``dataclasses.asdict`` gives."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import pytest

from perfscope.results.fields import _field, document_of, fields_of
from perfscope.results.rows import JobInfo
from perfscope.results.summary import SCHEMA
from tests.reports.examples import EXAMPLES


class Word(str, enum.Enum):
    ONE = "one"


class Pair(NamedTuple):
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Inner:
    text: str
    pairs: tuple[Pair, ...] = ()


@dataclasses.dataclass(frozen=True)
class Outer:
    held: Any


@pytest.mark.parametrize(
    "held",
    [
        None, True, 1, 1.5, "text", (), (1, 2.0, None), [1, [Inner("a")]], Word.ONE, (Word.ONE, 1), Pair(1, 2),
        Inner("a", (Pair(1, 2), Pair(3, 4))), (Inner("a"), (Inner("b"),)), {"a": Inner("b"), 3: {"c": (Inner("d"),)}},
    ],
)  # fmt: skip
def test_it_is_what_asdict_gives(held: Any) -> None:
    found, expected = document_of(Outer(held)), dataclasses.asdict(Outer(held))
    assert found == expected
    assert repr(found) == repr(expected)  # also of the same types


def test_what_can_change_is_a_copy() -> None:
    held = {"a": [1]}
    document = document_of(Outer(held))
    document["held"]["a"].append(2)
    document["held"]["b"] = 3
    assert held == {"a": [1]}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_summary_is_that_of_asdict_but_for_its_findings(name: str) -> None:
    summary = EXAMPLES[name]()
    findings = [finding.to_dict() for finding in summary.findings]
    expected = {"schema": SCHEMA, **dataclasses.asdict(summary), "findings": findings}
    found = summary.to_dict()
    assert list(found) == list(expected)
    assert repr(found) == repr(expected)


def test_a_field_read_alone_is_the_one_read_with_all() -> None:
    assert {name: _field(JobInfo, name) for name in fields_of(JobInfo)} == fields_of(JobInfo)
