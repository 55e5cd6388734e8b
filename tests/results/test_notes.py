"""Notes: a kind with values, and one sentence for each kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfscope.results.notes import SENTENCES, Note, ended, note


def test_counts_and_lists_are_written_as_words() -> None:
    assert note("steps", "few_steps", count=1).text.startswith("Only 1 step recorded:")
    assert note("steps", "few_steps", count=3).text.startswith("Only 3 steps recorded:")
    assert "ranks 0-2, 7 with the lowest" in note("clock", "clock_alone", (0, 1, 2, 7)).text
    assert note("reading", "reading", (1,), rank=1, source="a.gz", problems=["x", "y"]).text == "Rank 1 (a.gz): x; y."


def test_a_note_is_its_kind_and_values() -> None:
    made = ended(-9)
    assert (made.kind, made.values, made.ranks) == ("killed", {"signal": 9}, ())
    assert (ended(2).kind, ended(2).values) == ("exit_code", {"code": 2})
    assert json.loads(json.dumps(made.values)) == made.values


def test_a_note_knows_whether_its_sentence_names_the_ranks() -> None:
    assert note("clock", "clock_alone", (3,)).names_ranks
    assert not note("collection", "job_cut", (3,)).names_ranks
    assert not Note(about="other", kind="of a later version", text="Something.").names_ranks


@pytest.mark.parametrize("kind", SENTENCES)
def test_every_kind_is_reported_somewhere(root: Path, kind: str) -> None:
    sources = (*root.glob("analyzers/**/*.py"), *root.glob("reports/page/*.py"), root / "perfscope/results/notes.py")
    assert sum(path.read_text(encoding="utf-8").count(f'"{kind}"') for path in sources) > 1
