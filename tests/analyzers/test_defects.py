"""One rule that fails costs its own advice, and no page."""

from __future__ import annotations

from pathlib import Path

import pytest

import perfscope
from perfscope.analyzers import rules
from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Finding


def divides(job: RuleContext) -> Finding | None:
    raise ZeroDivisionError(f"{job.steps} by nothing")


def test_a_rule_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch, samples: Path) -> None:
    whole = perfscope.analyze(samples / "starved", workers=1)
    monkeypatch.delenv("PERFSCOPE_STRICT")
    monkeypatch.setattr(rules, "RULES", (divides, *rules.RULES))
    found = perfscope.analyze(samples / "starved", workers=1)
    assert [finding.title for finding in found.findings] == [finding.title for finding in whole.findings]
    (note,) = (note for note in found.notes if note.kind == "advice_failed")
    assert note.values["what"] == "What test-defects advises"
    assert "ZeroDivisionError in test_defects.py:" in note.text
    assert "by nothing" in note.text


def test_in_tests_it_fails(monkeypatch: pytest.MonkeyPatch, samples: Path) -> None:
    monkeypatch.setattr(rules, "RULES", (divides, *rules.RULES))
    with pytest.raises(ZeroDivisionError):
        perfscope.analyze(samples / "starved", workers=1)
