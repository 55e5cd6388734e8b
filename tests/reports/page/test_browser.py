"""The page in a real browser, opened from disk; ``look_at`` fails a test on any error or network request."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perfscope.reports.page import page
from perfscope.results.findings import blocks
from perfscope.results.rows import Verdict
from tests.reports.conftest import PATIENCE_MS, both
from tests.reports.examples import EXAMPLES, broken, gpu, large, starved, straggler

pytestmark = pytest.mark.browser

LookAt = Callable[..., Any]

TALL = 6000
"""A screen so high that every chart is near it: those further down are drawn when the reader comes near."""

WIDER = """() => Math.max(0, ...[...document.querySelectorAll(".plot")].map(
    (place) => place.querySelector("svg.main-svg").clientWidth - place.clientWidth))"""
"""By how much a chart is wider than its place, at most."""

FOLLOWED = (
    """() => [...document.querySelectorAll(".plot")].every((place) => place.layout.width === place.clientWidth)"""
)
"""Has every chart been drawn anew for the window's width? That is done at the window's rest."""


def until(tab: Any, condition: Callable[[], Any]) -> Any:
    """What a condition says once it holds; the page's policy forbids Playwright's own way to wait for one."""
    for _ in range(PATIENCE_MS // 50):
        if found := condition():
            return found
        tab.wait_for_timeout(50)
    raise AssertionError(f"waited {PATIENCE_MS // 1000} s")


def _column(tab: Any, table: str, index: int) -> list[str]:
    texts: list[str] = tab.locator(f"#{table} tbody tr > :nth-child({index})").all_inner_texts()
    return texts


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_opens_without_errors_and_without_sideways_scrolling(look_at: LookAt, name: str) -> None:
    tab = look_at(EXAMPLES[name](), width=400, height=TALL)
    for width in (400, 1280):
        tab.set_viewport_size({"width": width, "height": TALL})
        until(tab, lambda: tab.evaluate(FOLLOWED) and tab.evaluate(WIDER) <= 0)
        assert tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    assert tab.locator("h1").inner_text().replace("\xa0", " ") == EXAMPLES[name]().verdict.headline


def test_the_verdict_is_on_the_first_screen(look_at: LookAt) -> None:
    tab = look_at(straggler())
    for what in ("h1", ".first", ".sure", ".tiles", ".mean .bar", ".ranked"):
        box = tab.locator(what).bounding_box()
        assert box["y"] + box["height"] <= 800, what


def test_the_time_breakdown_has_a_bar_for_every_rank_and_part(look_at: LookAt) -> None:
    summary = gpu()
    tab = look_at(summary, height=TALL)
    parts = sum(value > 0 for row in summary.time_breakdown for value in row.categories().values())
    assert tab.locator("#chart-time_breakdown svg .bars .point path").count() == parts
    assert tab.locator("#chart-step_timeline svg .bars .point path").count() == sum(
        len(s.start_us) for s in summary.step_timeline
    )


def test_bars_are_as_long_as_the_numbers_say(look_at: LookAt) -> None:
    """Rank 2 computes twice as long as the others, and so is its bar."""
    summary = straggler()
    tab = look_at(summary)
    first_trace = tab.locator("#chart-time_breakdown svg .trace.bars").first
    widths = [path.bounding_box()["width"] for path in first_trace.locator(".point path").all()]
    compute = [row.compute_us for row in summary.time_breakdown]
    assert widths[2] / widths[0] == pytest.approx(compute[2] / compute[0], rel=0.02)


def test_many_ranks_are_a_heat_map(look_at: LookAt) -> None:
    tab = look_at(large())
    assert tab.locator("#chart-time_breakdown svg .hm image").count() == 2
    assert tab.locator("#chart-time_breakdown svg .bars").count() == 0
    assert tab.locator("#chart-step_timeline .yaxislayer-above text").count() == 32
    assert "517" in tab.locator("#chart-step_timeline .yaxislayer-above").text_content()


def test_hovering_a_bar_shows_rank_part_and_share(look_at: LookAt) -> None:
    tab = look_at(straggler())
    tab.locator("#chart-time_breakdown .nsewdrag").hover(position={"x": 30, "y": 15})
    expect = pytest.importorskip("playwright.sync_api").expect
    shown = tab.locator("#chart-time_breakdown .hoverlayer")
    for text in ("Compute", "rank 0", "59 ms"):
        expect(shown).to_contain_text(text)


@both
def test_a_heading_sorts_its_column_both_ways_and_by_number(look_at: LookAt) -> None:
    tab = look_at(straggler())
    heading = tab.locator("#time-breakdown thead th", has_text="Compute").first
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    assert _column(tab, "time-breakdown", 1)[0] == "2"
    heading.locator("button").focus()
    tab.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "ascending"
    assert _column(tab, "time-breakdown", 1)[-1] == "2"
    tab.locator("#time-breakdown thead th").first.locator("button").click()
    assert _column(tab, "time-breakdown", 1) == ["0", "1", "2", "3"]
    assert heading.get_attribute("aria-sort") == "none"


@both
def test_a_table_filters_to_the_rows_with_every_word_and_says_how_many(look_at: LookAt) -> None:
    tab = look_at(gpu())
    tools = tab.locator(".tools[data-table=time-breakdown]")
    tools.locator("input").fill("6")
    shown = tab.locator("#time-breakdown tbody tr:not([hidden])")
    assert all("6" in text for text in shown.all_inner_texts())
    assert tools.locator("output").inner_text() == f"{shown.count()} of 8 rows"
    tools.locator("input").fill("no such rank")
    assert shown.count() == 0
    tools.locator("input").fill("")
    assert shown.count() == 8


def test_a_table_is_saved_as_csv_with_full_numbers_and_harmless_texts(look_at: LookAt) -> None:
    summary = gpu()
    hosts = ('=cmd|"x"', *(row.host for row in summary.time_breakdown[1:]))
    rows = tuple(dataclasses.replace(row, host=host) for row, host in zip(summary.time_breakdown, hosts, strict=True))
    tab = look_at(dataclasses.replace(summary, time_breakdown=rows))
    with tab.expect_download() as download:
        tab.locator(".tools[data-table=time-breakdown] button.csv").click()
    assert download.value.suggested_filename == "time-breakdown.csv"
    lines = Path(download.value.path()).read_text(encoding="utf-8-sig").splitlines()
    assert lines[0].startswith("Rank,Host,Step (µs),Compute (µs)")
    table = list(csv.reader(lines))
    assert table[1][1] == """'=cmd|"x\""""
    assert [float(line[2]) for line in table[1:]] == [row.step_time_us for row in summary.time_breakdown]


def test_the_breakdown_is_sorted_by_what_the_reader_chooses(look_at: LookAt) -> None:
    tab = look_at(straggler())
    places = tab.locator("#chart-time_breakdown .yaxislayer-above text")
    highest = "all => all.sort((a, b) => a.getBoundingClientRect().y - b.getBoundingClientRect().y)[0].textContent"
    assert places.evaluate_all(highest).strip() == "node-a · rank 0"
    tab.locator("#breakdown-sort").select_option("compute")
    assert places.evaluate_all(highest).strip() == "rank 2"


@both
def test_the_timeline_shows_chosen_ranks_and_what_is_under_the_mouse(look_at: LookAt) -> None:
    tab = look_at(gpu(), height=TALL)
    lanes = tab.locator("#chart-timeline .yaxislayer-above text")
    before = lanes.count()
    chosen = tab.locator("#timeline-ranks input:checked")
    assert before == 3 * chosen.count()
    chosen.first.uncheck()
    assert lanes.count() == before - 3
    tab.locator("#chart-timeline .nsewdrag").hover(position={"x": 60, "y": 12})
    expect = pytest.importorskip("playwright.sync_api").expect
    shown = tab.locator("#chart-timeline .hoverlayer")
    for text in ("sm90_xmma_gemm_bf16", "launched by aten::mm"):
        expect(shown).to_contain_text(text)


@both
def test_charts_are_drawn_as_the_reader_comes_near_and_fit_a_changed_window(look_at: LookAt) -> None:
    tab = look_at(straggler())
    expect = pytest.importorskip("playwright.sync_api").expect
    far = tab.locator("#chart-bandwidth")
    assert far.locator("svg").count() == 0
    room = far.bounding_box()["height"]
    far.scroll_into_view_if_needed()
    expect(far.locator("svg.main-svg").first).to_be_attached()
    assert far.bounding_box()["height"] == room > 100
    near = tab.locator("#chart-time_breakdown")
    height = near.bounding_box()["height"]
    for width in (1000, 500, 1280):
        tab.set_viewport_size({"width": width, "height": 700})
        expect(near.locator("svg.main-svg").first).to_have_attribute("width", str(near.evaluate("e => e.clientWidth")))
        assert near.bounding_box()["height"] == pytest.approx(height, abs=60)  # narrow ones are laid out otherwise


def test_absent_values_stay_last_in_both_directions(look_at: LookAt) -> None:
    tab = look_at(broken())
    size = tab.locator("#collectives thead button", has_text="Size")
    for _ in range(2):
        size.click()
        assert _column(tab, "collectives", 4)[-1].startswith("–")


@both
def test_the_copy_button_copies_what_to_type(look_at: LookAt) -> None:
    tab = look_at(starved(), permissions=["clipboard-read", "clipboard-write"])
    tab.locator("#finding-1 > summary").click()
    button = tab.locator("button.copy").first
    button.evaluate(
        "(it) => { window.said = [];"
        "new MutationObserver(() => said.push(it.textContent)).observe(it, {childList: true}) }"
    )
    button.click()
    until(tab, lambda: "Copied" in tab.evaluate("said"))  # it is said for two seconds
    assert tab.evaluate("navigator.clipboard.readText()") == blocks(starved().findings[0].action.how)[0].text


@both
def test_a_finding_opens_to_its_evidence_and_a_link_opens_it_too(look_at: LookAt) -> None:
    tab = look_at(gpu())
    second = tab.locator("#finding-2")
    assert second.locator(".proof").is_hidden()
    second.locator("summary").first.focus()
    tab.keyboard.press("Enter")
    assert second.locator(".proof").is_visible()
    assert second.locator(".lengths .fill").first.bounding_box()["width"] > 0
    tab.evaluate("location.hash = '#finding-1'")
    tab.locator("#finding-1[open]").wait_for()


@both
def test_definitions_show_on_hover_and_on_focus_and_go_with_escape(look_at: LookAt) -> None:
    tab = look_at(gpu())
    tip = tab.locator("#tooltip")
    tab.locator(".tile .term", has_text="MFU").hover()
    assert "dense peak" in tip.inner_text()
    tab.keyboard.press("Escape")
    assert tip.is_hidden()
    tab.locator(".tile .term", has_text="Exposed communication").focus()
    assert "Exposed is not blocking" in tip.inner_text()


def test_an_absent_value_says_why(look_at: LookAt) -> None:
    tab = look_at(broken())
    tab.locator("#collectives .absent").first.hover()
    assert "Only one rank of the group" in tab.locator("#tooltip").inner_text()


def test_dark_follows_the_system_and_colours_the_charts(look_at: LookAt) -> None:
    tab = look_at(straggler(), color_scheme="dark")
    bar = tab.locator("#chart-time_breakdown .bars .point path").first
    expect = pytest.importorskip("playwright.sync_api").expect
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    expect(bar).to_have_css("fill", "rgb(48, 126, 221)")
    tab.emulate_media(color_scheme="light")
    expect(bar).to_have_css("fill", "rgb(26, 90, 170)")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_paper_is_light_and_unfolded(look_at: LookAt) -> None:
    tab = look_at(gpu(), color_scheme="dark")
    tab.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    tab.emulate_media(media="print")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.locator("#finding-1 .proof").is_visible()
    assert not tab.locator(".job summary").is_visible()
    assert tab.locator("#chart-time_breakdown svg.main-svg").first.bounding_box()["width"] <= 700  # A4, in px
    tab.emulate_media(media="screen")
    tab.evaluate("window.dispatchEvent(new Event('afterprint'))")
    tab.locator("#finding-1:not([open])").wait_for()


@both
def test_it_is_printed(look_at: LookAt) -> None:
    """Firefox does not end where the page changes its charts while it is printed."""
    tab = look_at(gpu())
    assert len(tab.pdf(format="A4")) > 20_000


def test_a_small_job_is_printed_on_two_to_four_pages(look_at: LookAt) -> None:
    printed = look_at(straggler()).pdf(format="A4")
    assert 2 <= len(re.findall(rb"/Type /Page\b", printed)) <= 4


@both
def test_names_from_a_trace_cannot_run(look_at: LookAt) -> None:
    attack = "</script><script>window.hit=1</script><img src=x onerror=window.hit=1>"
    summary = straggler()
    summary = dataclasses.replace(
        summary,
        verdict=Verdict(headline=attack, healthy=False, first_action=attack),
        job=dataclasses.replace(summary.job, hosts=(attack,), model={"name": attack, "parameters": 1}),
        time_breakdown=tuple(dataclasses.replace(row, host=attack) for row in summary.time_breakdown),
        collectives=tuple(dataclasses.replace(row, group=attack) for row in summary.collectives),
    )
    tab = look_at(summary)
    assert tab.locator("h1").inner_text() == attack
    tab.locator("#chart-time_breakdown .nsewdrag").hover(position={"x": 30, "y": 15})
    assert tab.evaluate("window.hit") is None
    assert tab.locator("img").count() == 0


@both
def test_the_policy_stops_a_script_that_got_in(browser: Any, tmp_path: Path) -> None:
    """As if escaping had failed: a script and a picture from the network, in the written page itself."""
    path = tmp_path / "report.html"
    attack = "<script>window.hit = 1</script><img src='http://127.0.0.1:9/x.png' onload='window.hit = 2'></body>"
    path.write_text(page.render(starved()).replace("</body>", attack), encoding="utf-8")
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    tab = context.new_page()
    tab.add_init_script(
        "window.refused = [];"
        "addEventListener('securitypolicyviolation', (event) => window.refused.push(event.effectiveDirective))"
    )
    tab.goto(path.as_uri())
    tab.locator("html[data-charts=drawn]").wait_for(state="attached")
    until(tab, lambda: {"img-src", "script-src-elem"} <= set(tab.evaluate("window.refused")))
    assert tab.evaluate("window.hit") is None
    context.close()


RANGE = "() => document.getElementById('chart-timeline').layout.xaxis.range"


@both
def test_the_timeline_is_worked_in_by_keyboard_wheel_and_search(look_at: LookAt) -> None:
    tab = look_at(gpu(), height=TALL)
    chart = tab.locator("#chart-timeline")
    expect = pytest.importorskip("playwright.sync_api").expect
    expect(chart.locator(".bartext", has_text="sm90_xmma").first).to_be_attached()
    chart.focus()
    whole = tab.evaluate(RANGE)
    tab.keyboard.press("w")
    narrower = pytest.approx(0.6 * (whole[1] - whole[0]), rel=0.01)
    near = until(tab, lambda: narrower == (shown := tab.evaluate(RANGE))[1] - shown[0] and shown)
    tab.keyboard.press("d")
    moved = until(tab, lambda: (shown := tab.evaluate(RANGE))[0] > near[0] and shown)
    tab.locator("#timeline-ranks input:not(:checked)").first.check()
    assert tab.evaluate(RANGE) == pytest.approx(moved)  # other ranks, the same view
    chart.focus()
    chart.locator(".nsewdrag").hover(position={"x": 60, "y": 12})
    tab.mouse.wheel(0, -300)
    until(tab, lambda: (shown := tab.evaluate(RANGE))[1] - shown[0] < moved[1] - moved[0])
    tab.keyboard.press("0")
    until(tab, lambda: tab.evaluate(RANGE) == pytest.approx(whole, rel=0.1))
    search = tab.locator("#timeline-tools input")
    search.fill("elementwise")
    expect(tab.locator("#timeline-tools output")).to_have_text("4 found")  # one on each rank shown
    search.press("Enter")
    expect(tab.locator("#timeline-tools output")).to_have_text("1 of 4")
    seen = tab.evaluate(RANGE)
    assert seen[0] <= 300 <= 360 <= seen[1]  # ms: where the short kernels run


@both
def test_the_theme_is_the_readers_choice(look_at: LookAt) -> None:
    tab = look_at(straggler(), color_scheme="light")
    expect = pytest.importorskip("playwright.sync_api").expect
    bar = tab.locator("#chart-time_breakdown .bars .point path").first
    tab.locator("button.theme").click()
    expect(bar).to_have_css("fill", "rgb(48, 126, 221)")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    tab.locator("button.theme").click()
    expect(bar).to_have_css("fill", "rgb(26, 90, 170)")
