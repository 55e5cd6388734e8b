"""What names a predicate is true of is asked once for all ranks whose names are the same."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from perfscope.trace.names import Names, is_kept

ASKED: list[str] = []


def is_sum(name: str) -> bool:
    ASKED.append(name)
    return name.endswith("sum")


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    ASKED.clear()


def test_another_rank_with_the_same_names_is_not_asked() -> None:
    first, second = Names(["a sum", "b", "c sum"], [4, 7, 2]), Names(["c sum", "a sum", "b"], [0, 1, 2])
    assert sorted(first.where(is_sum)) == [2, 4]
    assert sorted(second.where(is_sum)) == [0, 1]
    assert ASKED == ["a sum", "b", "c sum"]


def test_other_names_are_asked() -> None:
    assert Names(["d sum", "e"], [0, 1]).where(is_sum) == [0]
    assert Names(["d sum", "f sum"], [0, 1]).where(is_sum) == [0, 1]


def test_patterns_and_texts_are_told_apart_by_what_they_say_and_ask() -> None:
    names = Names(["aten::add", "add"], [0, 1])
    assert names.where(re.compile("add").match) == [1]
    assert names.where(re.compile("add").search) == [0, 1]
    assert names.where(re.compile("aten").match) == [0]
    assert names.where("add".__eq__) == [1]
    assert names.where("aten::add".__eq__) == [0]


def test_what_is_made_for_one_question_is_asked_each_time() -> None:
    names = Names(["a", "b"], [0, 1])
    for wanted in ("a", "b"):
        assert names.where(lambda name: name in wanted) == [("a", "b").index(wanted)]  # noqa: B023 - called here
    assert names.where({"b"}.__contains__) == [1]
    assert names.where({"a"}.__contains__) == [0]


@pytest.mark.parametrize(
    ("predicate", "kept"),
    [
        (is_sum, True),
        (re.compile("x").match, True),
        ("x".__eq__, True),
        (lambda _: True, False),
        ({"x": 1}.__contains__, False),
        (SimpleNamespace(x=1).__eq__, False),
    ],
    ids=["a module's function", "a pattern's method", "a text's method", "a lambda", "a dict's", "another object's"],
)
def test_is_kept(predicate, kept: bool) -> None:  # type: ignore[no-untyped-def]
    assert is_kept(predicate) is kept
