"""``perfscope doctor``: tries, one by one, what a recording needs, with a remedy for what does not work.

What can be tried is tried, in processes like those of a training: a version number proves little.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from perfscope.collectors.doctor import host as doctor_host
from perfscope.collectors.doctor import torch as doctor_torch
from perfscope.collectors.doctor.check import Level, Probe, Surroundings, ask

OLDEST_PYTHON: Final = (3, 10)


Examine = Callable[[Surroundings], Iterator[Probe]]


def examine(surroundings: Surroundings) -> Iterator[Probe]:
    """Every check, as each is done."""
    parts: tuple[Examine, ...] = (
        check_python, check_travel, doctor_torch.check_torch, doctor_host.check_output, doctor_host.check_shared_memory,
        doctor_host.check_cores, doctor_host.check_sampler, doctor_host.check_devices, doctor_host.check_tools,
        doctor_host.check_other_profilers,
    )  # fmt: skip
    for part in parts:
        try:
            yield from part(surroundings)
        except Exception as error:  # one trial that fails must not hide the others
            yield Probe(
                part.__name__.removeprefix("check_").replace("_", " "),
                Level.NOTE,
                f"could not be examined ({type(error).__name__}: {error})",
            )


def check_python(surroundings: Surroundings) -> Iterator[Probe]:
    """Is the interpreter new enough?"""
    version_info = ask(surroundings.python, "import json, sys; print(json.dumps(list(sys.version_info[:3])))")
    if version_info is None:
        yield Probe(
            "python",
            Level.BROKEN,
            f"{surroundings.python} does not run",
            "name the interpreter of the training environment with --python",
        )
        return
    version = ".".join(map(str, version_info))
    if tuple(version_info[:2]) < OLDEST_PYTHON:
        yield Probe(
            "python",
            Level.BROKEN,
            f"{surroundings.python} is Python {version}; the collector needs 3.10",
            "use a training environment with Python 3.10 or newer",
        )
    else:
        yield Probe("python", Level.OK, f"Python {version} ({surroundings.python})")


def check_travel(surroundings: Surroundings) -> Iterator[Probe]:
    """Does a ``sitecustomize`` first on PYTHONPATH run in a Python that a training starts?"""
    with tempfile.TemporaryDirectory(prefix="perfscope-doctor-") as folder:
        mark = Path(folder) / "seen"
        (Path(folder) / "sitecustomize.py").write_text(f"open({str(mark)!r}, 'w').close()\n", encoding="utf-8")
        before = surroundings.environment.get("PYTHONPATH", "")
        path = os.pathsep.join(filter(None, (folder, before)))
        ask(surroundings.python, "print('null')", {**surroundings.environment, "PYTHONPATH": path})
        arrived = mark.exists()
    if not arrived:
        yield Probe(
            "collector",
            Level.BROKEN,
            "the collector, which travels in PYTHONPATH, does not reach a Python started here",
            "start the training without python -E, -I and -S, and without a wrapper that replaces PYTHONPATH "
            "(or have it keep what is there)",
        )
        return
    theirs = ask(
        surroundings.python,
        "import importlib.util as u, json; s = u.find_spec('sitecustomize'); print(json.dumps(s.origin if s else ''))",
        surroundings.environment,
    )
    also = f"; your own {theirs} runs after it" if theirs else ""
    yield Probe("collector", Level.OK, f"reaches every Python process by PYTHONPATH{also}")


def default_python() -> str:
    """The interpreter that this runs in."""
    return sys.executable or "python"
