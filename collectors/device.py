"""Asks a device whether it has finished its work without waiting for it for ever, and its allocator what it counted.

Stopping the profiler waits for the device. When a job ends because a peer crashed, a collective may be under way that
never finishes, and a process that should have died would hang.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any, Final

PATIENCE_S: Final = 10.0

_ACCELERATORS: Final = ("cuda", "xpu")

_MEMORY_COUNTS: Final = {
    "peak_bytes": "reserved_bytes.all.peak",
    "allocated_peak_bytes": "allocated_bytes.all.peak",
    "allocation_retries": "num_alloc_retries",
}
"""Field of ``DeviceMetadata`` -> key of ``torch.cuda.memory_stats``, which other devices' allocators share."""


def device_types(modules: Iterable[Any]) -> list[str]:
    """Types of the devices that hold the modules' parameters, ``cpu`` left out.

    Parameters that are offloaded lie on the host between steps: where all do, the devices that the process has
    initialised.
    """
    kinds = {parameter.device.type for module in modules for parameter in module.parameters()}
    return sorted(kinds - {"cpu", "meta"}) or [kind for kind in _ACCELERATORS if _is_initialised(kind)]


def _is_initialised(kind: str) -> bool:
    library: Any = sys.modules.get(f"torch.{kind}")
    return library is not None and bool(library.is_initialized())


def memory_counts(library: Any, index: int) -> dict[str, int]:
    """What the allocator of one device counted since the process began, under ``DeviceMetadata``'s names.

    ``library`` is ``torch.cuda`` or its like. What its allocator does not count is left out.
    """
    counted = library.memory_stats(index) if hasattr(library, "memory_stats") else {}
    return {name: int(counted[key]) for name, key in _MEMORY_COUNTS.items() if key in counted}


def devices(modules: Iterable[Any]) -> list[tuple[str, int | None]]:
    """Type and index of the devices that hold the modules' parameters, or are current on this thread: see
    ``device_types``. None is the only one of its type.
    """
    modules = list(modules)
    held = {(each.device.type, each.device.index) for module in modules for each in module.parameters()}
    found = {(kind, index) for kind, index in held if kind not in ("cpu", "meta")}
    return sorted(found, key=str) or [(kind, _current(kind)) for kind in device_types(modules)]


def _current(kind: str) -> int | None:
    library: Any = sys.modules[f"torch.{kind}"]
    return int(library.current_device()) if hasattr(library, "current_device") else None


class DeviceProbe:
    """A thread that waits for ``devices`` when asked.

    Made while the job runs: from Python 3.12 an interpreter that is ending starts no threads. Which device is current
    belongs to each thread, and is the first one on a new thread: it would be some other rank's.
    """

    def __init__(self, devices: list[tuple[str, int | None]]) -> None:
        self._devices = devices
        self._asked = threading.Event()
        self._idle = threading.Event()
        if devices:
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
        for kind, index in self._devices:
            getattr(torch, kind).synchronize(*(() if index is None else (index,)))
        self._idle.set()
