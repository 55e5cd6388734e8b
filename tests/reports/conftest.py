"""Pages as files, and a browser that looks at them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perfscope.reports.page import page
from perfscope.results.summary import Summary
from tests.reports import firefox

BROWSER_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

both = pytest.mark.parametrize("browser", ["chromium", "firefox"], indirect=True)
"""What a reader works with holds in Firefox too."""

PATIENCE_MS = 120_000
"""How long anything may take in a browser: on a busy machine it does."""


@pytest.fixture(scope="session")
def playwright() -> Iterator[Any]:
    """Drives browsers; skips where it is not installed."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    api.expect.set_options(timeout=PATIENCE_MS)
    with api.sync_playwright() as started:
        yield started


@pytest.fixture(scope="session")
def in_chromium(playwright: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A headless Chromium: the one that PERFSCOPE_CHROMIUM names, else the machine's; skips where there is none."""
    path = os.environ.get("PERFSCOPE_CHROMIUM") or request.getfixturevalue("chromium")
    started = playwright.chromium.launch(executable_path=path, args=list(BROWSER_OPTIONS))
    yield started
    started.close()


@pytest.fixture(scope="session")
def in_firefox(playwright: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The machine's Firefox; skips where there is none."""
    if firefox.installed() is None:
        pytest.skip("no Firefox on this machine")
    with firefox.started(playwright, tmp_path_factory.mktemp("firefox")) as started:
        yield started


@pytest.fixture
def browser(request: pytest.FixtureRequest) -> Any:
    """Chromium, or what a test marked ``parametrize("browser", [...], indirect=True)`` asks for."""
    return request.getfixturevalue(f"in_{getattr(request, 'param', 'chromium')}")


@pytest.fixture
def look_at(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens a summary's page from disk; fails the test on any console error, page error or other request."""
    contexts = []
    problems: list[str] = []
    requests: list[str] = []

    def open_page(summary: Summary, *, width: int = 1280, height: int = 800, **context_options: Any) -> Any:
        path = tmp_path / "report.html"
        page.write(summary, path)
        context = browser.new_context(viewport={"width": width, "height": height}, **context_options)
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        tab = context.new_page()
        tab.on(
            "console", lambda message: problems.append(message.text) if message.type in {"error", "warning"} else None
        )
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("request", lambda sent: requests.append(sent.url))
        tab.goto(path.as_uri())
        # By selector: the page's policy forbids the evaluation that waiting for an expression needs.
        tab.locator("html[data-charts=drawn]").wait_for(state="attached")
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
    assert [url for url in requests if not url.startswith(("file:", "blob:"))] == []
