"""The timeline of one step: which ranks it shows, what its entries contain, and its caption."""

from __future__ import annotations

from perfscope.reports.page import timeline
from tests.reports.examples import gpu


def test_the_timeline_shows_stragglers_and_the_longest_waiting_first() -> None:
    summary = gpu()
    made = timeline.timeline_chart(summary)
    assert made is not None
    assert [row["rank"] for row in made["ranks"]] == list(range(8))
    waits = {row.rank: row.exposed_comm_wait_us for row in summary.time_breakdown}
    shown = {row["rank"] for row in made["ranks"] if row["shown"]}
    assert len(shown) == timeline.SHOWN_FIRST
    assert max(waits, key=waits.__getitem__) in shown
    assert {row.rank for row in summary.stragglers[:2]} <= shown


def test_a_lane_shows_operator_bytes_group_and_wait() -> None:
    made = timeline.timeline_chart(gpu())
    assert made is not None
    compute, collective, _ = made["ranks"][2]["lanes"]
    texts = made["texts"]
    assert texts[compute["operator"][0]] == "aten::mm"
    assert (compute["pieces"], compute["busy"]) == ([1, 40], [1.0, 0.25])
    assert texts[collective["group"][0]] == "fsdp"
    assert (collective["bytes"], collective["wait"]) == (["386 MiB"], [9.002])
    assert made["unit"] == "ms"


def test_the_timeline_names_which_collective_is_longest_and_splits_it() -> None:
    reading = timeline.timeline_reading(gpu())
    assert reading.startswith("Step 17.")
    assert "all-gather of 386 MiB" in reading
    assert "waiting" in reading
