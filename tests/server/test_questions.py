"""Questions with known answers: the tools must give them, with the calls that the question names."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jmespath
import pytest

from perfscope.server.pages import DEFAULT_CHARACTERS, text_of
from perfscope.server.serve import server
from tests.server.client import call
from tests.server.jobs import Recordings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).with_name("questions.toml")


@dataclass(frozen=True, kw_only=True)
class Graded:
    """A question, the calls that must suffice, and the answer."""

    ask: str
    recording: str
    calls: tuple[dict[str, Any], ...]
    at: str
    value: Any
    truth: str | None = None
    within: float | None = None
    also: tuple[str, ...] = ()
    slow: bool = False

    def agrees(self, found: Any, with_value: Any, within: float | None) -> bool:
        """Whether a value is the one expected."""
        if within is None:
            return type(found) is type(with_value) and bool(found == with_value)
        return bool(found == pytest.approx(with_value, rel=within))


QUESTIONS = [Graded(**each) for each in tomllib.loads(FILE.read_text(encoding="utf-8"))["question"]]


def test_there_are_enough_questions_about_all_tools_that_answer() -> None:
    assert len(QUESTIONS) >= 40
    asked = {each["tool"] for question in QUESTIONS for each in question.calls}
    assert asked >= {
        "collectives", "compare", "data_loading", "findings", "hang", "history", "kernels", "list_recordings", "step",
        "steps", "stragglers", "summary", "table", "time_breakdown", "what_if",
    }  # fmt: skip


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory, samples: Path) -> Recordings:
    return Recordings(tmp_path_factory.mktemp("recordings"), samples)


@pytest.fixture(scope="module")
def served(recordings: Recordings) -> Any:
    return server(recordings.folder)


@pytest.mark.parametrize(
    "question",
    [
        pytest.param(each, marks=[pytest.mark.scale] if each.slow else [], id=f"{number}-{each.recording}")
        for number, each in enumerate(QUESTIONS)
    ],
)
def test_the_tools_answer(question: Graded, recordings: Recordings, served: Any) -> None:
    truth = recordings.truth(question.recording)
    for other in question.also:
        recordings.truth(other)
    if question.truth is not None:  # the file says what is true, rounded
        within = None if question.within is None else min(question.within, 0.005)
        assert question.agrees(truth[question.truth], question.value, within), truth
    answers = [call(served, each["tool"], **each["arguments"]) for each in question.calls]
    assert all(len(text_of(answer)) <= DEFAULT_CHARACTERS for answer in answers)
    found = jmespath.search(question.at, answers[-1])
    expected = truth[question.truth] if question.truth is not None else question.value
    assert question.agrees(found, expected, question.within), f"{question.ask} {found!r} instead of {expected!r}"
