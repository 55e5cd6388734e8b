"""A comparison as page, Markdown and text; a check as JUnit XML, Markdown and text."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

import perfscope
from perfscope.reports import junit, markdown
from perfscope.reports.compare import page as comparison_page
from perfscope.reports.compare import pictures, terminal, words
from perfscope.results.budget import FAILED, PASSED, SKIPPED, UNKNOWN, Check, CheckRow
from perfscope.results.comparison import Comparison
from perfscope.results.summary import Summary
from tests.reports.conftest import PATIENCE_MS
from tests.reports.examples import EXAMPLES, breakdown, gpu, healthy, job, large, starved, straggler

HOSTILE = "</script><script>alert(1)</script> [x](http://x) | `y` @someone 'q' \"q\" \u202egnp"


def _steps(summary: Summary, *step_ms: float, **changes: Any) -> Summary:
    """The same job with steps of these lengths, all ranks computing in all of it except 2 ms of loading."""
    count = len(step_ms)
    mean = sum(step_ms) / count
    rows = {"compute": tuple((ms - 2) * 1000 for ms in step_ms), "idle_dataloader": (2000.0,) * count}
    return replace(
        summary,
        job=replace(job(2, step_ms), time_breakdown_us_per_step=rows, **changes),
        time_breakdown=tuple(breakdown(rank, compute=mean - 2, idle_dataloader=2.0) for rank in (0, 1)),
        critical_path=None,
    )


BEFORE = _steps(starved(), 100, 101, 99, 100, 100.5, 99.5)
FASTER = _steps(healthy(), 80, 81, 79, 80, 80.5, 79.5)
NOISY = _steps(healthy(), 60, 140, 70, 130, 90, 100)


def test_the_headline_is_how_much_faster_and_why() -> None:
    comparison = perfscope.compare(BEFORE, FASTER)
    found = comparison.differences[0]
    assert words.headline(comparison, found).endswith(
        "is 1.25x faster: the step time changed from 100 ms to 80.0 ms (−20.0 ms)."
    )
    assert words.because(found) == "Each step has 20.0 ms less compute."


def test_slower_is_the_ratio_of_step_times() -> None:
    assert words.pace(80.0, 100.0) == "1.25x slower"
    assert words.pace(100.0, 95.0) == "1.05x faster"
    assert words.pace(0.0, 95.0) == "of unknown speed"


def test_a_number_within_the_noise_has_no_colour() -> None:
    shown = {tile.label: tile for tile in pictures.tiles(perfscope.compare(BEFORE, NOISY).differences[0])}
    assert (shown["Step time"].change, shown["Step time"].good) == ("within noise", "")
    better = {tile.label: tile for tile in pictures.tiles(perfscope.compare(BEFORE, FASTER).differences[0])}
    assert (better["Step time"].change, better["Step time"].good) == ("−20%", "yes")


def test_noise_is_called_noise_and_how_many_steps_would_help() -> None:
    comparison = perfscope.compare(BEFORE, _steps(healthy(), 60, 140, 70, 130, 80, 90))
    found = comparison.differences[0]
    assert found.step.verdict == "same"
    assert words.headline(comparison, found).startswith("Within noise")
    assert words.because(found) == ""
    assert re.search(r"record about \d+ steps of each", words.certainty(found))


def test_unknown_is_not_guessed() -> None:
    comparison = perfscope.compare(_steps(starved(), 100), _steps(starved(), 50))
    assert "too few steps to judge" in words.headline(comparison, comparison.differences[0])


def test_bars_are_as_long_as_the_times_and_meet_end_to_end() -> None:
    comparison = perfscope.compare(BEFORE, FASTER)
    long, short = pictures.run_bars(comparison.runs)
    assert sum(segment.width for segment in long.segments) == pytest.approx(100)
    assert sum(segment.width for segment in short.segments) == pytest.approx(80)
    for bar in (long, short):
        for left, right in zip(bar.segments, bar.segments[1:], strict=False):
            assert left.left + left.width == pytest.approx(right.left)


def test_change_bars_begin_at_zero_and_are_to_scale() -> None:
    drawn = pictures.deltas(perfscope.compare(BEFORE, FASTER).differences[0])
    assert drawn is not None
    (compute,) = [bar for bar in drawn.bars if bar.name == "compute"]
    assert compute.left + compute.width == pytest.approx(drawn.zero)
    assert compute.width == pytest.approx(drawn.total.width)
    assert (compute.significant, compute.verdict) == ("yes", "significant")


def test_dots_are_every_step_on_one_axis() -> None:
    comparison = perfscope.compare(BEFORE, FASTER)
    found = pictures.dots(comparison.runs)
    assert found is not None
    rows, low, high = found
    assert [len(row.places) for row in rows] == [6, 6]
    assert max(rows[1].places) < min(rows[0].places)
    assert (low, high) == ("78.3 ms", "102 ms")


@pytest.mark.parametrize("first", EXAMPLES)
@pytest.mark.parametrize("second", ["healthy", "broken", "nothing"])
def test_any_two_jobs_can_be_compared(first: str, second: str) -> None:
    comparison = perfscope.compare(EXAMPLES[first](), EXAMPLES[second]())
    page = comparison_page.render(comparison)
    assert "None" not in re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert markdown.of_comparison(comparison)
    assert terminal.comparison(comparison)


def test_a_thousand_ranks_make_a_small_page() -> None:
    assert len(comparison_page.render(perfscope.compare(large(), large()))) < 2_000_000


def test_names_are_text_everywhere() -> None:
    hostile = replace(
        FASTER,
        source=HOSTILE,
        findings=tuple(replace(finding, title=HOSTILE) for finding in starved().findings),
        job=replace(FASTER.job, settings={"ddp": {HOSTILE: HOSTILE}}, command=(HOSTILE,)),
    )
    comparison = perfscope.compare(BEFORE, hostile)
    page = comparison_page.render(comparison)
    assert "<script>alert" not in page
    text = markdown.of_comparison(comparison)
    assert "<script" not in text
    assert not re.search(r"(?<!\\)\]\(|://", text)
    assert not re.search(r"@\w", text)
    assert "\u202e" not in text
    assert "\u202e" not in terminal.comparison(comparison)


def test_ids_are_unique_with_several_runs() -> None:
    page = comparison_page.render(perfscope.compare(straggler(), straggler(), gpu(), starved()))
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_definitions_named_exist() -> None:
    page = comparison_page.render(perfscope.compare(BEFORE, FASTER, gpu()))
    for key in re.findall(r'data-def="([^"]+)"', page):
        assert f'id="def-{key}"' in page


def test_the_page_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "comparison.html"
    comparison_page.write(perfscope.compare(BEFORE, FASTER), path)
    assert path.read_text(encoding="utf-8").endswith("</html>")
    assert list(tmp_path.iterdir()) == [path]


def test_markdown_tables_have_as_many_cells_in_every_row() -> None:
    text = markdown.of_comparison(perfscope.compare(straggler(), starved())) + markdown.of_summary(straggler())
    for block in re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE):
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(cells) == 1, block
    assert text.count("<details>") == text.count("</details>")


def test_markdown_of_a_summary_has_the_verdict_and_what_to_do() -> None:
    text = markdown.of_summary(starved())
    assert text.startswith(f"### PerfScope: {markdown.escaped(starved().verdict.headline)}")
    assert "What to change" in text
    assert markdown.escaped(starved().findings[0].title) in text


def test_markdown_of_a_summary_has_what_each_change_costs() -> None:
    first, *others = straggler().findings
    dear = dataclasses.replace(first, action=dataclasses.replace(first.action, costs="Twice the memory."))
    free = [dataclasses.replace(each, action=dataclasses.replace(each.action, costs=None)) for each in others]
    text = markdown.of_summary(dataclasses.replace(straggler(), findings=(dear, *free)))
    assert [line for line in text.splitlines() if "costs:" in line] == ["- Change 1 costs: Twice the memory."]


def _check(*rows: CheckRow) -> Check:
    return Check(source="rec", budget="b.toml", baseline=None, headline=HOSTILE, rows=rows)


def _row(status: str, name: str = "step_time at most", message: str = "beyond the limit") -> CheckRow:
    return CheckRow(
        name=name, status=status, unit="us", measured=431_000.0, limit=420_000.0, baseline=None, message=message
    )


def test_junit_counts_and_names_what_failed() -> None:
    document = junit.render(_check(_row(FAILED), _row(UNKNOWN, "a"), _row(SKIPPED, "b"), _row(PASSED, "c")))
    root = ET.fromstring(document.split("\n", 1)[1])
    suite = root[0]
    assert (root.tag, suite.tag) == ("testsuites", "testsuite")
    counted = [suite.get(key) for key in ("tests", "failures", "errors", "skipped")]
    assert counted == ["4", "1", "1", "1"]
    tags = [[child.tag for child in case] for case in suite.iter("testcase")]
    assert tags == [["failure"], ["error"], ["skipped"], ["system-out"]]
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert failure.get("message") == "beyond the limit (measured 431 ms, limit 420 ms)"
    assert all(case.get("classname") and case.get("name") for case in suite.iter("testcase"))


def test_junit_stays_xml_whatever_names_hold() -> None:
    document = junit.render(_check(_row(FAILED, "a\x00b<&>\ud800", f"\x1b[31m{HOSTILE}")))
    root = ET.fromstring(document.encode("utf-8"))
    case = root.find("testsuite/testcase")
    assert case is not None
    assert case.get("name") == "a\ufffdb<&>\ufffd"


def test_a_check_as_text_and_markdown_begins_with_what_failed() -> None:
    check = _check(_row(PASSED, "holds"), _row(FAILED, "breaks"))
    text = terminal.check(check)
    assert text.index("breaks") < text.index("holds")
    assert text.splitlines()[-1] == "1 of 2 checks failed"
    written = markdown.of_check(check)
    assert "1 of 2 checks failed" in written
    assert written.index("breaks") < written.index("holds")
    assert "[x](" not in written


@pytest.mark.browser
def test_the_page_in_a_browser(browser: Any, tmp_path: Path) -> None:
    """Opens from disk without errors or requests, at three widths; tables sort, terms explain themselves."""
    path = tmp_path / "comparison.html"
    comparison_page.write(perfscope.compare(BEFORE, FASTER, replace(gpu(), source="gpu")), path)
    problems: list[str] = []
    requests: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(PATIENCE_MS)
    tab = context.new_page()
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("request", lambda sent: requests.append(sent.url))
    tab.goto(path.as_uri())
    for width in (400, 1280, 2560):
        tab.set_viewport_size({"width": width, "height": 800})
        assert tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    tab.set_viewport_size({"width": 1280, "height": 800})
    box = tab.locator(".runs").first.bounding_box()
    assert box["y"] + box["height"] <= 800, "the picture of the runs is on the first screen"
    widths = [bar.bounding_box()["width"] for bar in tab.locator(".runs .part.c-compute").all()[:2]]
    assert widths[1] / widths[0] == pytest.approx(78 / 98, rel=0.01)
    tab.locator(".runs .term", has_text="Compute").hover()
    assert "At least one compute kernel is running" in tab.locator("#tooltip").inner_text()
    table = tab.locator("#metrics-1")
    heading = table.locator("thead button").nth(1)
    heading.click()
    assert table.locator("thead th").nth(1).get_attribute("aria-sort") == "descending"
    context.close()
    assert problems == []
    assert [url for url in requests if not url.startswith("file:")] == []


def test_scaling_is_the_title_where_devices_differ() -> None:
    def on(world: int, mean: float) -> Summary:
        base = _steps(healthy(), *(mean + off for off in (-1.0, 0.0, 1.0)), world_size=world)
        return replace(base, source=f"{world}-ranks")

    comparison: Comparison = perfscope.compare(on(8, 125.0), on(2, 100.0))
    assert words.title(comparison) == "8 devices have 3.2x the throughput of 2: 80% scaling efficiency."
    page = comparison_page.render(comparison)
    assert "Scaling losses" in page


def test_a_large_change_between_uneven_steps_is_not_called_noise() -> None:
    uneven = _steps(healthy(), 100, 100, 100, 220, 100, 100, 100, 220)
    comparison = perfscope.compare(BEFORE, uneven)
    found = comparison.differences[0]
    assert found.step.verdict == "same"
    assert words.headline(comparison, found).startswith("Not certain: the step time of")
    assert "between" in words.headline(comparison, found)
