"""Which part of its job this process is, where not all processes are ranks of one training."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from perfscope.collectors.identity import Identity, from_environment, identify
from perfscope.recording.roles import role_in_name

ROLE_VARIABLE: Final = "PERFSCOPE_ROLE"
"""A process sets it to the name of its role, before its first step at the latest."""

_RAY: Final = re.compile(rb"^ray::(\w+)")
"""Title that Ray gives to an actor's process: ``ray::RolloutWorker.generate``."""


def stated_role(environment: Mapping[str, str] | None = None) -> str:
    """The role that this process has by its environment, its Ray actor's class or its multiprocessing name.

    ``PERFSCOPE_ROLE`` counts before ``torchrun --role``. Of names that were given for another purpose only the words
    that name a role are taken. Empty where nothing states one.
    """
    environment = os.environ if environment is None else environment
    stated = environment.get(ROLE_VARIABLE, "").strip()
    if stated:
        return stated
    elastic = environment.get("ROLE_NAME", "")
    if elastic not in ("", "default"):  # torchrun's own
        return elastic
    return role_in_name(_ray_class()) or role_in_name(_process_name())


def identify_with_role(role: str) -> Identity:
    """Who this process is. One that a rank started for another role is no rank, although it inherits its variables."""
    distributed: Any = sys.modules.get("torch.distributed")
    joined = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if role and not joined and _inherits_rank():
        return Identity()
    return identify()


def _inherits_rank() -> bool:
    """Is this a child, made by multiprocessing, of a process with the same rank of several?"""
    processes: Any = sys.modules.get("multiprocessing.process")
    if processes is None or processes.parent_process() is None:
        return False
    mine = from_environment(os.environ)
    with suppress(OSError):
        entries = Path(f"/proc/{os.getppid()}/environ").read_bytes().decode(errors="replace").split("\0")
        parent = dict(entry.partition("=")[::2] for entry in entries)
        return mine.world_size > 1 and from_environment(parent) == mine
    return False


def _ray_class() -> str:
    with suppress(OSError):
        found = _RAY.match(Path("/proc/self/cmdline").read_bytes())
        return found[1].decode() if found else ""
    return ""


def _process_name() -> str:
    processes: Any = sys.modules.get("multiprocessing.process")
    return processes.current_process().name if processes is not None else ""
