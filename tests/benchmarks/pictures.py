"""Pictures of pages in every look, to be looked at; and those in docs/images.

    python -m tests.benchmarks.pictures [--only ranks_64 starved] [--into pictures] [--docs]

Of each page: the first screen and all of it at 1280 and 400 px, dark, on paper (also as PDF) and, where there is one,
in Firefox. A page that cannot be made here is left out, with the reason. ``--docs`` renews docs/images alone.
"""

from __future__ import annotations

import argparse
import base64
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from perfscope.reports.compare import page as comparison_page
from perfscope.reports.page import page
from perfscope.results.comparison import Comparison
from tests.benchmarks.pages import PAGES, ROOT, LeftOutError
from tests.reports import firefox
from tests.reports.conftest import BROWSER_OPTIONS

PAPER_WIDTH: Final = 718
"""CSS pixels between the margins of an A4 page."""

TALL: Final = 16_000
"""A screen so high that all charts are near it, and drawn."""

AS_WEBP: Final = """async (png) => {
    const image = await createImageBitmap(await (await fetch(`data:image/png;base64,${png}`)).blob());
    const canvas = Object.assign(document.createElement("canvas"), { width: image.width, height: image.height });
    canvas.getContext("2d").drawImage(image, 0, 0);
    return canvas.toDataURL("image/webp", 0.85).split(",")[1];
}"""
"""Packs a picture again: a third of its bytes."""


@dataclass(frozen=True)
class Look:
    """How a page is looked at."""

    name: str
    width: int = 1280
    height: int = 800
    dark: bool = False
    paper: bool = False


LOOKS: Final = (
    Look("1280"), Look("400", width=400), Look("dark", dark=True), Look("paper", width=PAPER_WIDTH, paper=True),
)  # fmt: skip


@dataclass(frozen=True)
class DocsPicture:
    """One picture of the documentation: a first screen, or the part that ``of`` selects."""

    page: str
    look: Look
    of: str = ""


DOCS: Final = {
    "report-slow-rank-1280": DocsPicture("slow_rank", Look("1280")),
    "report-slow-rank-400": DocsPicture("slow_rank", Look("400", width=400, height=1500)),
    "report-slow-rank-2560": DocsPicture("slow_rank", Look("2560", width=2560, height=1600)),
    "report-dark": DocsPicture("slow_rank", Look("dark", dark=True)),
    "report-healthy": DocsPicture("healthy", Look("1280", height=620)),
    "report-starved": DocsPicture("starved", Look("1280", height=620)),
    "report-1024-ranks": DocsPicture("ranks_1024", Look("1280"), "#time-breakdown-section"),
    "report-timeline": DocsPicture("slow_rank", Look("1280"), "figure:has(#chart-timeline)"),
    "report-curves": DocsPicture("starved", Look("1280"), "figure:has([id^=chart-whatif])"),
}


def main() -> int:
    """Make the pictures; 1 where a page of the documentation was left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of pages")
    parser.add_argument("--into", type=Path, default=ROOT / "pictures")
    parser.add_argument("--docs", action="store_true", help="docs/images alone")
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    needed = {picture.page for picture in DOCS.values()}
    names = [name for name in PAGES if name in (options.only or (needed if options.docs else PAGES))]
    made = dict(_written(names, options.into))

    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = os.environ.get("PERFSCOPE_CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=list(BROWSER_OPTIONS))
        for name in made if not options.docs else ():
            for look in LOOKS:
                _looked_at(browser, made[name], look)
        for name, picture in DOCS.items():
            if picture.page in made:
                _documented(browser, made[picture.page], picture, ROOT / "docs" / "images" / f"{name}.webp")
        browser.close()
        if firefox.installed() and not options.docs:
            with firefox.started(playwright, options.into) as browser:
                for path in made.values():
                    _looked_at(browser, path, Look("firefox"))
    return int(bool(needed & set(names) - set(made)))


def _written(names: Sequence[str], into: Path) -> Iterator[tuple[str, Path]]:
    """The pages by name."""
    for name in names:
        path = into / f"{name}.html"
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = PAGES[name](Path(folder))
            except LeftOutError as error:
                print(f"{name}: left out: {error}", file=sys.stderr)
                continue
        if isinstance(result, Comparison):
            comparison_page.write(result, path)
        else:
            page.write(result, path)
        print(path, flush=True)
        yield name, path


def _opened(browser: Any, path: Path, look: Look) -> Any:
    """The page in a tab of its own, its charts drawn."""
    context = browser.new_context(
        viewport={"width": look.width, "height": look.height}, color_scheme="dark" if look.dark else "light"
    )
    context.set_default_timeout(120_000)
    tab = context.new_page()
    tab.goto(path.resolve().as_uri())
    if tab.locator(".plot").count():
        tab.locator("html[data-charts=drawn]").wait_for(state="attached", timeout=120_000)
    return tab


def _looked_at(browser: Any, path: Path, look: Look) -> None:
    """The first screen and the whole page."""
    tab = _opened(browser, path, look)
    stem = path.with_name(f"{path.stem}-{look.name}")
    if look.paper:
        tab.pdf(path=f"{stem}.pdf", format="A4", print_background=True)
        tab.emulate_media(media="print")
        tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    else:
        tab.screenshot(path=f"{stem}.png")
        _draw_all(tab)
    tab.screenshot(path=f"{stem}-whole.png", full_page=True)
    tab.context.close()


def _draw_all(tab: Any) -> None:
    """Charts far from the screen are not drawn yet."""
    width, height = tab.viewport_size["width"], tab.viewport_size["height"]
    tab.set_viewport_size({"width": width, "height": TALL})
    for _ in range(tab.locator(".plot:not(.js-plotly-plot)").count()):
        tab.locator(".plot:not(.js-plotly-plot)").first.wait_for(state="detached")
    tab.set_viewport_size({"width": width, "height": height})


def _documented(browser: Any, path: Path, picture: DocsPicture, into: Path) -> None:
    """One picture of the documentation."""
    tab = _opened(browser, path, picture.look)
    if picture.of:
        _draw_all(tab)
    shown = (tab.locator(picture.of).first if picture.of else tab).screenshot()
    tab.context.close()
    tab = browser.new_page()
    packed = tab.evaluate(AS_WEBP, base64.b64encode(shown).decode("ascii"))
    tab.close()
    into.write_bytes(base64.b64decode(packed))


if __name__ == "__main__":
    sys.exit(main())
