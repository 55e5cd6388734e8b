"""What a notebook shows of results."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import perfscope
from perfscope.results.findings import Findings
from perfscope.results.rows import Verdict
from tests.reports.examples import EXAMPLES, healthy, starved, straggler


def test_the_verdict_and_where_the_step_goes() -> None:
    shown = straggler()._repr_html_()
    assert "Rank 2 on node-b makes the others wait" in shown
    assert "Do first: <bdi>Find out what slows rank 2" in shown
    assert "Step time 126 ms: compute 59% · waiting for late ranks 37%" in shown


def test_nothing_to_do_is_not_printed() -> None:
    assert "Do first" not in healthy()._repr_html_()


def test_it_is_short_for_every_example() -> None:
    for make in EXAMPLES.values():
        assert len(make()._repr_html_()) < 2500


def test_text_from_a_recording_is_escaped() -> None:
    evil = "<script>alert(1)</script>"
    summary = dataclasses.replace(
        straggler(),
        verdict=Verdict(headline=evil, healthy=False, first_action=evil),
        job=dataclasses.replace(straggler().job, devices=(evil,), model={"name": evil}),
    )
    shown = summary._repr_html_()
    assert "<script" not in shown
    assert shown.count("&lt;script&gt;") >= 3


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_repr_is_short(name: str) -> None:
    summary = EXAMPLES[name]()
    comparison = perfscope.compare(healthy(), summary)
    for value in (summary, comparison, *comparison.differences, *summary.findings):
        assert len(repr(value)) < 500


def test_a_repr_names_what_it_is() -> None:
    assert "Rank 2 on node-b" in repr(straggler())
    assert repr(straggler().findings[0]).startswith("<Finding straggler, high severity: ")


def test_findings_are_a_table_and_each_one_says_what_to_do() -> None:
    summary = starved()
    shown = summary.findings._repr_html_()
    assert shown.count("<tr>") == 1 + len(summary.findings)
    first = summary.findings[0]._repr_html_()
    assert "<pre><code>loader = DataLoader(dataset, num_workers=1, persistent_workers=True)</code></pre>" in first
    assert "Nothing worth changing" in Findings()._repr_html_()
    assert summary.findings == tuple(summary.findings)


def test_a_comparison_says_what_changed_and_where() -> None:
    shown = perfscope.compare(healthy(), straggler())._repr_html_()
    assert '<th scope="col">Verdict</th>' in shown
    assert "Waiting for late ranks" in shown


@pytest.mark.scale
@pytest.mark.parametrize("sample", ["healthy", "starved", "slow_rank"])
def test_samples(samples: Path, sample: str) -> None:
    summary = perfscope.analyze(samples / sample)
    answer = perfscope.whatif(samples / sample, {"network.bandwidth": "2x"})
    comparison = perfscope.compare(samples / sample, samples / "healthy")
    for value in (summary, answer, comparison, *comparison.differences, *summary.findings):
        assert len(repr(value)) < 500
    for shown in (summary, answer, comparison, summary.findings, *summary.findings):
        html = shown._repr_html_()
        assert html.startswith("<div>")
        assert len(html) < 6000
    assert "network.bandwidth=2x" in answer._repr_html_()
