"""For tests that wait for other processes: a busy machine may keep any of them from a core for seconds."""

from __future__ import annotations

import random
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 500.0
"""For anything that is to happen: below the limit of a test (``timeout`` in pyproject.toml), so that it is named."""

_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Linux: the first and the last port that the system gives to whoever asks for any."""


def until(condition: Callable[[], object], what: str, process: subprocess.Popen[Any] | None = None) -> None:
    """Wait for a condition. ``process`` is to bring it about: when that has ended, nothing more is waited for."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        ended = process is not None and process.poll() is not None
        if condition():
            return
        assert not ended, f"the command has ended before {what}"
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s until {what}"
        time.sleep(0.05)


def free_port() -> int:
    """A port of loopback on which nobody listens, and which the system gives to nobody who asks for any port.

    A process under test takes seconds to listen on it; meanwhile tests beside this one make many connections.
    """
    first = int(_GIVEN_OUT.read_text().split()[0]) if _GIVEN_OUT.exists() else 32768
    chance = random.SystemRandom()
    while True:
        port = chance.randrange(first // 2, first)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
