"""NCCL Inspector in the ranks of a command: the variables with which NCCL, or RCCL, loads its plugin and where it logs.

Source of the variables: nccl, ``ext-profiler/inspector/README.md``. Those that are set already stay.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from perfscope.recording.inspector import FOLDER

LIBRARIES: Final = ("libnccl-profiler-inspector.so", "librccl-profiler-inspector.so")
LIBRARY_VARIABLE: Final = "NCCL_PROFILER_PLUGIN"

_INTERVAL_US: Final = "500"
"""The plugin's own example. Of operations that follow each other faster on a communicator the last one is logged."""


def variables(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment; ``folder`` is the recording's."""
    wanted = {
        LIBRARY_VARIABLE: find_library(environment) or "inspector",
        "NCCL_INSPECTOR_ENABLE": "1",
        "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": _INTERVAL_US,
        "NCCL_INSPECTOR_DUMP_DIR": str(folder / FOLDER),
    }
    return {name: value for name, value in wanted.items() if name not in environment}


def find_library(environment: Mapping[str, str]) -> str | None:
    """The plugin that the variable names, or that lies in ``LD_LIBRARY_PATH``; None where neither does."""
    named = environment.get(LIBRARY_VARIABLE)
    if named:
        return named
    places = [Path(place) for place in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep) if place]
    return next((str(place / name) for place in places for name in LIBRARIES if (place / name).is_file()), None)


def remove_logs(folder: Path) -> None:
    """Remove the logs of a recording. Raises OSError."""
    place = folder / FOLDER
    for path in place.glob("*-pid*.log") if place.is_dir() else ():
        path.unlink()
