"""A hang on the page, in the terminal and in Markdown: who, where, since when, how sure; names are escaped."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from perfscope.analyzers.analyze import analyze
from perfscope.reports import markdown, terminal
from perfscope.reports.page import page
from perfscope.results.hang import HangCallSite
from perfscope.results.summary import Summary
from tests.analyzers.hang.dumps import START_NS, Groups, op, write
from tests.reports.examples import healthy

GROUPS: Groups = {"0": ("default_pg", range(3)), "1": ("<b>TP</b>", (1, 2))}


def _stuck(folder: Path) -> Summary:
    """Rank 0 does not join all-reduce 2; rank 2 waits for rank 1, which waits there."""
    ops = {
        0: [op("0", 1, at_ms=100)],
        1: [op("0", 1, at_ms=100), op("0", 2, at_ms=200, state="started")],
        2: [op("0", 1, at_ms=100), op("1", 1, at_ms=150, state="started"), op("0", 2, at_ms=151, state="scheduled")],
    }
    write(folder, GROUPS, ops)
    stack = 'Thread 7 (active): "MainThread"\n    fetch (data.py:12)\n    <module> (train.py:90)\n'
    (folder / "rank0.stack").write_text(stack)
    return analyze(folder)


def test_terminal(tmp_path: Path) -> None:
    text = " ".join(terminal.verdict(_stuck(tmp_path)).split())
    assert "The job stands still: rank 0 did not join all_reduce 2 of default_pg (0); ranks 1, 2 wait there." in text
    assert "Do first: Look at what rank 0 does in fetch (data.py:12)." in text
    assert "High confidence: " in text
    assert "wait there since 2027-01-15 08:00:00.151 UTC (1024, Float)" in text
    assert "rank 0: did not issue it, and waits for no other rank; last issued: all_reduce 1 of default_pg (0)" in text
    assert "Step time" not in text


def test_page(tmp_path: Path) -> None:
    html = page.render(_stuck(tmp_path))
    assert 'href="#hang">Why the job stands still' in html
    for name in ("hang-missing", "hang-sites"):
        assert f'<table id="{name}"' in html
    assert 'id="communication"' not in html
    assert "<b>TP" not in html


def test_a_hang_beside_traces_keeps_the_breakdown(tmp_path: Path) -> None:
    hang = _stuck(tmp_path).hang
    assert hang is not None
    site = HangCallSite(ranks=(1,), file="<i>.py", line=3, function="f", source="stack", missing=False)
    summary = dataclasses.replace(healthy(), hang=dataclasses.replace(hang, call_sites=(site,)))
    html = page.render(summary)
    assert "<i>.py" not in html
    assert 'id="communication"' in html
    assert "Step time" in terminal.verdict(summary)


def test_dumps_without_a_hang_claim_nothing_of_what_was_not_recorded(tmp_path: Path) -> None:
    write(tmp_path, GROUPS, {rank: [op("0", 1, at_ms=100)] for rank in range(3)})
    summary = analyze(tmp_path)
    assert summary.verdict.headline.startswith("No hang")
    html = page.render(summary)
    for absent in ('class="tile"', 'id="evidence"', 'id="change"', "No rank is a straggler", "could be analyzed"):
        assert absent not in html, absent


def test_markdown_and_json(tmp_path: Path) -> None:
    summary = _stuck(tmp_path)
    text = markdown.of_summary(summary)
    assert re.search(r"Rank 0|rank 0", text)
    assert "|  |  |" not in text
    again = Summary.from_dict(summary.to_dict())
    assert again.hang == summary.hang
    stated = summary.to_dict()["hang"]
    assert stated["missing_ranks"] == (0,)
    assert stated["since_us"] == START_NS / 1e3 + 151e3
    assert summary.frames.hang["confidence"].tolist() == ["high"]
    assert healthy().to_dict()["hang"] is None
