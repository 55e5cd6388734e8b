"""The cards of findings: speedups, lengths to scale, money, and commands."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfscope.reports import markdown, terminal
from perfscope.reports.page import advice, tiles
from perfscope.reports.page.advice import measure
from perfscope.reports.page.definitions import DEFINITIONS
from perfscope.results.findings import Prediction
from perfscope.results.rows import Plan
from tests.reports.examples import gpu, straggler


def test_money_is_a_tile_and_stands_with_each_finding() -> None:
    summary = gpu()
    (tile,) = (tile for tile in tiles.tiles(summary) if tile.definition == "cost")
    assert tile.value == "480 USD"
    assert "savings up to 31.5 USD per day" in tile.detail
    assert [card.saving for card in advice.cards(summary)][:2] == [
        "at most 48.0 USD per day",
        "31.5 USD per day (28.0 to 33.0)",
    ]


def test_a_card_shows_now_predicted_and_at_best_to_scale() -> None:
    (card, *_) = advice.cards(straggler())
    now, *others = card.lengths
    assert (now.kind, now.width) == ("now", 100.0)
    step = straggler().job.step_us
    predicted = straggler().findings[0].predicted_step_us
    assert predicted is not None
    by_kind = {length.kind: length for length in others}
    assert by_kind["predicted"].width == pytest.approx(100 * predicted.mid / step)
    assert by_kind["predicted"].low == pytest.approx(100 * predicted.low / step)
    assert all(length.definition in DEFINITIONS for length in card.lengths)


def test_a_wide_range_is_said_everywhere_and_not_its_middle() -> None:
    """A step of 119 ms may take 2 to 100 ms: the middle of 4 is nothing to go by."""
    first, *others = straggler().findings
    wide = Prediction(low=2e3, mid=4e3, high=100e3)
    finding = dataclasses.replace(first, predicted_step_us=wide, ceiling=straggler().job.step_us / 4e3 - 1)
    plan = Plan(whatif={"rank.1": "peers", "network.bandwidth": "2x"}, predicted_step_us=wide)
    summary = dataclasses.replace(straggler(), findings=(finding, *others), plan=plan)
    said = wide.speedup_of(summary.job.step_us)
    assert said == "1.19x to 60x"
    card = advice.cards(summary)[0]
    assert card.speedup.short == f"predicted {said} faster"
    assert card.speedup.full.startswith(f"Predicted speedup: {said}. 4.00 ms per step (2.00 ms to 100 ms)")
    assert "Upper bound" not in card.speedup.full
    assert f"predicted speedup {said}," in (advice.plan_sentence(summary) or "")
    for text in (terminal.verdict(summary), markdown.of_summary(summary)):
        assert said in text
        assert "30x" not in text


def test_what_to_type_survives_a_shell() -> None:
    summary = dataclasses.replace(straggler(), source="my traces; ls")
    command = advice.whatif_command({"rank.3": "peers", "ddp.comm_dtype": "$(rm -rf ~)"}, summary)
    assert command == "perfscope whatif 'my traces; ls' --set rank.3=peers --set 'ddp.comm_dtype=$(rm -rf ~)'"
    assert advice.whatif_command({}, summary) == ""


@given(st.floats(allow_nan=True, allow_infinity=True), st.sampled_from(["us", "share", "bytes", "x", "", "GB/s"]))
def test_no_number_reads_nan_or_inf(value: float, unit: str) -> None:
    text = measure(value, unit)
    assert "nan" not in text
    assert "inf" not in text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (42_500.0, "us", "42.5 ms"),
        (42.5, "ms", "42.5 ms"),
        (0.412, "share", "41%"),
        (26_214_400, "bytes", "25.0 MiB"),
        (1.14, "x", "1.14x"),
        (4, "", "4"),
        (12, "steps", "12 steps"),
        (244.7, "GB/s", "245 GB/s"),
    ],
)
def test_measure(value: float, unit: str, text: str) -> None:
    assert measure(value, unit) == text
