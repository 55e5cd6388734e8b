"""``perfscope doctor``: tries, one by one, what a recording needs, and says what to do about what does not work.

What can be tried is tried, in processes like those of a training: a version number proves little.
"""

from __future__ import annotations

import enum
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

OLDEST_PYTHON: Final = (3, 10)
OLDEST_TORCH: Final = (2, 1)
PATIENCE_S: Final = 120.0
"""For one trial: importing torch takes that long on a slow network file system."""


class State(str, enum.Enum):
    """What a trial showed."""

    OK = "ok"
    NOTE = "note"
    """Works, or is not needed, but the user should know."""
    BROKEN = "broken"
    """A recording would fail, or miss what it is for."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One trial's outcome."""

    name: str
    state: State
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


Examine = Callable[[Surroundings], Iterator[Check]]


def examine(surroundings: Surroundings) -> Iterator[Check]:
    """Every check, as each is done."""
    from perfscope.collectors import doctor_host, doctor_torch

    parts: tuple[Examine, ...] = (
        check_python, check_travel, doctor_torch.check_torch, doctor_host.check_output, doctor_host.check_shared_memory,
        doctor_host.check_cores, doctor_host.check_sampler, doctor_host.check_devices, doctor_host.check_tools,
        doctor_host.check_other_profilers,
    )  # fmt: skip
    for part in parts:
        try:
            yield from part(surroundings)
        except Exception as error:  # one trial that fails must not hide the others
            yield Check(
                name=part.__name__.removeprefix("check_").replace("_", " "),
                state=State.NOTE,
                text=f"could not be examined ({type(error).__name__}: {error})",
            )


def check_python(surroundings: Surroundings) -> Iterator[Check]:
    """Is the interpreter new enough?"""
    told = ask(surroundings.python, "import json, sys; print(json.dumps(list(sys.version_info[:3])))")
    if told is None:
        yield Check(
            name="python",
            state=State.BROKEN,
            text=f"{surroundings.python} does not run",
            remedy="name the interpreter of the training environment with --python",
        )
        return
    version = ".".join(map(str, told))
    if tuple(told[:2]) < OLDEST_PYTHON:
        yield Check(
            name="python",
            state=State.BROKEN,
            text=f"{surroundings.python} is Python {version}; the collector needs 3.10",
            remedy="use a training environment with Python 3.10 or newer",
        )
    else:
        yield Check(name="python", state=State.OK, text=f"Python {version} ({surroundings.python})")


def check_travel(surroundings: Surroundings) -> Iterator[Check]:
    """Does a ``sitecustomize`` first on PYTHONPATH run in a Python that a training starts?"""
    with tempfile.TemporaryDirectory(prefix="perfscope-doctor-") as folder:
        mark = Path(folder) / "seen"
        (Path(folder) / "sitecustomize.py").write_text(f"open({str(mark)!r}, 'w').close()\n", encoding="utf-8")
        before = surroundings.environment.get("PYTHONPATH", "")
        path = os.pathsep.join(filter(None, (folder, before)))
        ask(surroundings.python, "print('null')", {**surroundings.environment, "PYTHONPATH": path})
        arrived = mark.exists()
    if not arrived:
        yield Check(
            name="collector",
            state=State.BROKEN,
            text="the collector, which travels in PYTHONPATH, does not reach a Python started here",
            remedy="start the training without python -E, -I and -S, and without a wrapper that replaces PYTHONPATH "
            "(or have it keep what is there)",
        )
        return
    theirs = ask(
        surroundings.python,
        "import importlib.util as u, json; s = u.find_spec('sitecustomize'); print(json.dumps(s.origin if s else ''))",
        surroundings.environment,
    )
    also = f"; your own {theirs} runs after it" if theirs else ""
    yield Check(name="collector", state=State.OK, text=f"reaches every Python process by PYTHONPATH{also}")


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


def default_python() -> str:
    """The interpreter that this runs in."""
    return sys.executable or "python"
