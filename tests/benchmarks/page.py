"""How large the page is, and how soon it can be used, for jobs of 3, 8, 64 and 1,024 generated ranks.

    python -m tests.benchmarks.page [--ranks 3 8 64 1024] [--rounds 3]

Each page is opened from disk in headless Chromium. *Interactive*: from the start of the navigation until a click on
the first finding has opened its evidence and the screen has been painted again, the click being sent as soon as the
page has been parsed. *Charts*: until those within a screen and a half are drawn; the others are drawn when the reader
comes near. *CPU* is what the page's main thread computed until it was interactive: on a machine that does other work,
the rest of the wait is that work's. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import perfscope
from perfscope.reports.page import page
from tests.generator import MIB, JobSpec, ModelSpec, SlowCompute, simulate

LIMIT_BYTES = {3: 2.2e6, 8: 6e6, 1024: 12e6}
"""What a page of so many ranks may weigh at most."""
LIMIT_S = 2.0
"""How late a page may be interactive."""
LIMIT_CPU_S = 0.5
"""What its main thread may compute until then."""
LIMIT_CHARTS_S = 2.5
"""How late the charts near the screen may be drawn."""

OPENED = """() => new Promise((done) => {
    const summary = document.querySelector(".ranked summary");
    summary.click();
    requestAnimationFrame(() => requestAnimationFrame(() => done([performance.now(), summary.parentElement.open])));
})"""
"""Clicks the first finding; when that was painted, in ms since the navigation began."""
MARK = "name => performance.getEntriesByName(name).map((entry) => entry.startTime)[0]"


def spec(ranks: int) -> JobSpec:
    """A job of so many ranks, one of them slow."""
    return JobSpec(
        ranks=ranks,
        steps=6,
        noise=0.02,
        bucket_bytes=8 * MIB,
        model=ModelSpec(layers=4 if ranks <= 64 else 2),
        causes=(SlowCompute(ranks=(ranks // 2 + 1,), factor=1.4),),
    )


def written(folder: Path, ranks: int) -> Path:
    """The page of the job of so many ranks."""
    traces = folder / f"{ranks}"
    simulate(spec(ranks)).write(traces)
    path = folder / f"{ranks}.html"
    page.write(perfscope.analyze(traces), path)
    shutil.rmtree(traces)
    return path


def timed(browser: Any, path: Path) -> tuple[float, float, float]:
    """Seconds until the page is interactive, of them on the CPU, and until it has its charts."""
    tab = browser.new_page(viewport={"width": 1280, "height": 800})
    meter = tab.context.new_cdp_session(tab)
    meter.send("Performance.enable", {"timeDomain": "threadTicks"})
    try:
        tab.goto(path.as_uri(), wait_until="domcontentloaded")
        opened_ms, is_open = tab.evaluate(OPENED)
        found = {metric["name"]: metric["value"] for metric in meter.send("Performance.getMetrics")["metrics"]}
        if not is_open:
            raise RuntimeError(f"{path}: a click on the first finding did not open it")
        tab.locator("html[data-charts=drawn]").wait_for(state="attached", timeout=120_000)
        charts_ms = tab.evaluate(MARK, "perfscope-charts")
    finally:
        tab.close()
    return opened_ms / 1e3, found["TaskDuration"], charts_ms / 1e3


def lines(browser: Any, folder: Path, counts: list[int], rounds: int) -> Iterator[tuple[str, bool]]:
    """A line of the table for each number of ranks, and whether it is within the limits."""
    for ranks in counts:
        path = written(folder, ranks)
        size = path.stat().st_size
        rows = [timed(browser, path) for _ in range(rounds)]
        interactive, cpu, charts = (median(row[column] for row in rows) for column in range(3))
        within = interactive <= LIMIT_S and cpu <= LIMIT_CPU_S and charts <= LIMIT_CHARTS_S
        good = within and size <= LIMIT_BYTES.get(ranks, max(LIMIT_BYTES.values()))
        yield f"| {ranks:,} | {size / 1e6:.2f} | {interactive:.2f} | {cpu:.2f} | {charts:.2f} |", good


def main() -> int:
    """Print the table; 1 where a page is too large or too late."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[3, 8, 64, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("| ranks | MB | interactive s | CPU s | charts s |")
    print("|---|---|---|---|---|", flush=True)
    all_good = True
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for line, good in lines(browser, Path(name), options.ranks, options.rounds):
            print(line, "" if good else "over the limit", flush=True)
            all_good &= good
        browser.close()
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
