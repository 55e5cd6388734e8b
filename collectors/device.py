"""Asks a device whether it has finished its work without waiting for it for ever.

Stopping the profiler waits for the device. When a job ends because a peer crashed, a collective may be under way that
never finishes, and a process that should have died would hang.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Final

PATIENCE_S: Final = 10.0


def device_types(modules: Iterable[Any]) -> list[str]:
    """Types of the devices that hold the modules' parameters, ``cpu`` left out."""
    kinds = {parameter.device.type for module in modules for parameter in module.parameters()}
    return sorted(kinds - {"cpu", "meta"})


class DeviceProbe:
    """A thread that waits for the devices when asked.

    Made while the job runs: from Python 3.12 an interpreter that is ending starts no threads.
    """

    def __init__(self, kinds: list[str]) -> None:
        self._kinds = kinds
        self._asked = threading.Event()
        self._idle = threading.Event()
        if kinds:
            threading.Thread(target=self._wait, name="perfscope-device", daemon=True).start()
        else:
            self._idle.set()

    def idle(self) -> bool:
        """Have all devices finished within :data:`PATIENCE_S`? Ask once."""
        self._asked.set()
        return self._idle.wait(PATIENCE_S)

    def _wait(self) -> None:
        import torch

        self._asked.wait()
        for kind in self._kinds:
            getattr(torch, kind).synchronize()
        self._idle.set()
