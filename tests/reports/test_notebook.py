"""What a notebook shows of a summary."""

from __future__ import annotations

import dataclasses

from perfscope.results.rows import Verdict
from tests.reports.examples import EXAMPLES, healthy, straggler


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


def test_its_repr_is_short_for_every_example() -> None:
    for make in EXAMPLES.values():
        assert len(repr(make())) < 500
    assert "Rank 2 on node-b" in repr(straggler())
