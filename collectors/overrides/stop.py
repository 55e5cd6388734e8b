"""Ends a training after so many steps, gently: every rank leaves after the same step, by ``SystemExit``.

So ``finally`` clauses and ``with`` blocks run, and launchers see ranks that end well. A rank that left before the
others have their last gradients could take them down with it, hence they wait for each other through files; no
collective of ours could be kept apart from the script's.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from perfscope.recording.paths import BOOTSTRAP_FOLDER

STOPPED: Final = "stopped-"
"""In the bootstrap folder, followed by the rank: it has taken its last step."""

PATIENCE_S: Final = 20.0
"""For ranks that do not come."""

_LOOK_S: Final = 0.02


def end_training(folder: Path, rank: int, world_size: int) -> None:
    """Leave with the other ranks. Raises SystemExit, always."""
    with suppress(Exception):  # the device's own failure is the script's to meet
        _finish_device_work()
    with suppress(OSError):
        (folder / BOOTSTRAP_FOLDER / f"{STOPPED}{rank}").touch()
        until = time.monotonic() + PATIENCE_S
        while len(stopped(folder)) < world_size and time.monotonic() < until:
            time.sleep(_LOOK_S)
    raise SystemExit(0)


def stopped(folder: Path) -> frozenset[int]:
    """Ranks that have taken their last step. Raises OSError."""
    names = (path.name for path in (folder / BOOTSTRAP_FOLDER).glob(f"{STOPPED}*"))
    return frozenset(int(name.removeprefix(STOPPED)) for name in names)


def _finish_device_work() -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
