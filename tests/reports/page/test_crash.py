"""A failed job on the page, in the terminal and in Markdown: which rank, why, who failed in consequence."""

from __future__ import annotations

from dataclasses import replace

from perfscope.analyzers.crash.words import verdict
from perfscope.reports import markdown, terminal
from perfscope.reports.page import page
from perfscope.results.anonymous import anonymous
from perfscope.results.ending.crash import Crash, RankEnd
from perfscope.results.summary import Summary
from tests.reports.examples import healthy

CAUSE = RankEnd(
    rank=1, how="exception", is_cause=True, steps=31, error="ValueError", message="<b>bad</b>\nmore", exit_code=1,
    file="/home/me/my_train.py", line=25, function="main", ended_at="2026-11-28T03:35:22.100+00:00",
)  # fmt: skip
VICTIM = replace(CAUSE, rank=0, is_cause=False, error="RuntimeError", message="Connection closed by peer", line=20)


def failed() -> Summary:
    crash = Crash(cause_ranks=(1,), ends=(CAUSE, VICTIM))
    return replace(healthy(), crash=crash, verdict=verdict(crash))


def test_terminal_and_markdown() -> None:
    for text in (terminal.verdict(failed()), markdown.of_summary(failed())):
        words = " ".join(text.replace("\\", "").split())
        assert "rank 1 raised ValueError: " in words
        assert "rank 0 in consequence: raised RuntimeError: Connection closed by peer (in main, my" in words
        assert "Look at main (/home/me/my" in words


def test_page() -> None:
    html = page.render(failed())
    assert 'id="crash"' in html
    assert "<b>bad" not in html
    assert "raised ValueError: &lt;b&gt;bad&lt;/b&gt; (in main, my_train.py:25)" in html
    assert 'id="crash"' not in page.render(healthy())


def test_json_and_frames() -> None:
    summary = failed()
    assert Summary.from_dict(summary.to_dict()).crash == summary.crash
    assert summary.frames.crash["error"].tolist() == ["ValueError", "RuntimeError"]


def test_names_of_files_are_replaced_in_sentences_too() -> None:
    summary = anonymous(failed())
    assert "my_train" not in str(summary.to_dict())
