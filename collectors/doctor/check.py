"""One check of ``perfscope doctor``: what is examined, what came out, and how an interpreter is asked."""

from __future__ import annotations

import enum
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PATIENCE_S: Final = 120.0
"""For one trial: importing torch takes that long on a slow network file system."""


class Level(str, enum.Enum):
    """What a trial showed."""

    OK = "ok"
    NOTE = "note"
    """Works, or is not needed, but the user should know."""
    BROKEN = "broken"
    """A recording would fail, or miss what it is for."""


@dataclass(frozen=True)
class Probe:
    """One trial's outcome."""

    name: str
    state: Level
    text: str
    remedy: str = ""
    """What to do; empty where there is nothing to be done."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What is examined."""

    python: str
    """The interpreter that trainings are started with."""
    output: Path
    """Where recordings are to lie."""
    environment: Mapping[str, str]
    root: Path = Path("/")
    """Where ``proc``, ``sys`` and ``dev`` are."""


def ask(python: str, code: str, environment: Mapping[str, str] | None = None, timeout_s: float = PATIENCE_S) -> Any:
    """What a piece of code prints as JSON on its last line, run by an interpreter; None where it fails."""
    try:
        done = subprocess.run(
            [python, "-c", code],
            env=dict(environment) if environment is not None else None,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return None
