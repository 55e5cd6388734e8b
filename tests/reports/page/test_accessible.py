"""The page without a mouse and without sight, in a real browser: by keyboard, read aloud, and by axe's rules."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.reports.conftest import both
from tests.reports.examples import EXAMPLES, gpu, large, straggler

pytestmark = pytest.mark.browser

LookAt = Callable[..., Any]

MOST_STOPS = 30
FOCUSED = "() => document.activeElement.closest('main > section')?.id ?? ''"
LAST = "() => [...document.querySelectorAll('main > section')].at(-1).id"


@pytest.mark.parametrize("name", ["gpu", "straggler", "large"])
def test_tab_reaches_the_last_section_in_few_stops(look_at: LookAt, name: str) -> None:
    tab = look_at(EXAMPLES[name]())
    last = tab.evaluate(LAST)
    stops = 0
    while tab.evaluate(FOCUSED) != last and stops <= MOST_STOPS:
        tab.keyboard.press("Tab")
        stops += 1
    assert stops <= MOST_STOPS + 1  # the last one is in that section


@both
def test_arrows_go_from_part_to_part_and_within_a_table(look_at: LookAt) -> None:
    tab = look_at(straggler())
    focused = "() => document.activeElement.id || document.activeElement.textContent.trim()"
    tab.locator("#communication h2 a").focus()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowDown")
    assert tab.evaluate(focused) == "chart-overlap"
    tab.locator("#collectives thead button").first.focus()
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate(focused) == "Group"
    tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("ArrowLeft")
    assert tab.evaluate("document.activeElement.className") == "scroll"


@both
def test_a_charts_values_are_shown_and_said_one_by_one(look_at: LookAt) -> None:
    tab = look_at(straggler())
    expect = pytest.importorskip("playwright.sync_api").expect
    chart = tab.locator("#chart-time_breakdown")
    assert "Time breakdown per rank" in chart.get_attribute("aria-label")
    chart.focus()
    tab.keyboard.press("ArrowRight")
    expect(tab.locator("#spoken")).to_contain_text("Compute rank 0")
    tab.keyboard.press("ArrowRight")
    expect(tab.locator("#spoken")).to_contain_text("Compute rank 1")
    expect(chart.locator(".hoverlayer .hovertext")).to_have_count(1)


def test_a_heat_maps_cells_are_said_too(look_at: LookAt) -> None:
    tab = look_at(large())
    expect = pytest.importorskip("playwright.sync_api").expect
    tab.locator("#chart-time_breakdown").focus()
    tab.keyboard.press("ArrowRight")
    expect(tab.locator("#spoken")).to_contain_text("Compute rank 0")


def test_each_section_and_chart_has_a_link_of_its_own(look_at: LookAt) -> None:
    tab = look_at(gpu())
    places = tab.eval_on_selector_all(".permalink", "all => all.map((each) => each.getAttribute('href'))")
    assert {"#time-breakdown-section", "#communication", "#chart-timeline", "#collectives-title"} <= set(places)
    assert all(tab.locator(place).count() == 1 for place in places)
    tab.locator("#communication .permalink").first.click()
    assert tab.evaluate("location.hash") == "#communication"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_axe_finds_nothing(look_at: LookAt, name: str, scheme: str) -> None:
    script = Path(os.environ.get("PERFSCOPE_AXE", "axe.min.js"))
    if not script.is_file():
        pytest.skip("axe-core is not installed: npm install axe-core, PERFSCOPE_AXE=node_modules/axe-core/axe.min.js")
    tab = look_at(EXAMPLES[name](), color_scheme=scheme, bypass_csp=True)
    tab.evaluate(script.read_text(encoding="utf-8"))
    found = tab.evaluate(
        "axe.run().then((found) => found.violations.map((one) => [one.id, one.nodes.map((node) => node.html)]))"
    )
    assert found == []
