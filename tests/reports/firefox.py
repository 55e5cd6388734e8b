"""Debian's Firefox for Playwright, which has a build of its own to download but also speaks WebDriver BiDi.

``python -m tests.reports.firefox FIREFOX [ARGUMENTS]`` starts Firefox and passes the protocol on. What Firefox does not
know of it yet (media features) is answered as if it were done: a Firefox in the dark is started as one.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tornado.web import Application
from tornado.websocket import WebSocketHandler, websocket_connect

UNKNOWN: Final = "emulation.setMediaFeaturesOverride"
LARGE: Final = 256 << 20
"""Bytes of a message: pictures of whole pages are messages."""
LISTENS: Final = re.compile(r"(WebDriver BiDi listening on )(ws://\S+)")


def installed() -> str | None:
    """Path of the machine's Firefox."""
    return shutil.which("firefox-esr") or shutil.which("firefox")


@contextmanager
def started(playwright: Any, folder: Path, *, dark: bool = False) -> Iterator[Any]:
    """A headless Firefox as Playwright's browser; ``folder`` takes the command that starts it."""
    command = folder / "firefox.sh"
    here = shlex.join([sys.executable, "-m", __name__, installed() or ""])
    command.write_text(f'#!/bin/sh\ncd {shlex.quote(str(Path(__file__).parents[2]))} && exec {here} "$@"\n')
    command.chmod(0o755)
    browser = playwright.firefox.launch(
        channel="moz-firefox", executable_path=command, firefox_user_prefs={"ui.systemUsesDarkTheme": int(dark)}
    )
    try:
        yield browser
    finally:
        browser.close()


class _Passes(WebSocketHandler):
    """One connection of Playwright, and one to Firefox."""

    def initialize(self, address: str) -> None:
        self.address = address

    async def open(self, *path: str) -> None:
        self.firefox = await websocket_connect(
            self.address + self.request.path, max_message_size=LARGE, on_message_callback=self._answer
        )

    async def on_message(self, message: str | bytes) -> None:
        asked = json.loads(message)
        if asked["method"] == UNKNOWN:
            await self.write_message(json.dumps({"type": "success", "id": asked["id"], "result": {}}))
        else:
            await self.firefox.write_message(message)

    def _answer(self, message: str | bytes | None) -> None:
        if message is None:
            self.close()
        else:
            self.write_message(message)

    def on_close(self) -> None:
        self.firefox.close()


async def _main(command: list[str]) -> int:
    firefox = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert firefox.stderr is not None
    async for line in firefox.stderr:
        text = line.decode(errors="replace")
        found = LISTENS.search(text)
        if found:
            application = Application([(r"/.*", _Passes, {"address": found[2]})], websocket_max_message_size=LARGE)
            server = application.listen(0, "127.0.0.1")
            port = next(iter(server._sockets.values())).getsockname()[1]
            text = f"{found[1]}ws://127.0.0.1:{port}\n"
        sys.stderr.write(text)
        sys.stderr.flush()
    return await firefox.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(_main(sys.argv[1:])))
