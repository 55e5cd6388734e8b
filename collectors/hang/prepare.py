"""What has to be in place before the script makes its process groups."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.hang import stacks, watch

BUFFER_VARIABLES: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Entries that the flight recorder holds; torch before 2.8 knows the second alone, and later versions warn of it."""

BUFFER_ENTRIES: Final = 2000
"""What torch holds by default since it records at all times."""

ALWAYS_RECORDS: Final = (2, 9)
"""From this torch on the flight recorder is on unless it is switched off."""


def prepare(folder: str) -> None:
    """Torch has been imported in a process that may become a rank. ``folder`` is the bootstrap's."""
    config = CollectorConfig.load(Path(folder))
    torch: Any = sys.modules["torch"]
    if not torch.distributed.is_available():
        watch.make(config)
        return
    _switch_recorder_on(torch.__version__)
    stacks.notice_users_timers()
    watching = watch.make(config)
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    replacement = _watched(c10d.init_process_group, watching)
    for module in (c10d, torch.distributed):
        module.init_process_group = replacement


def prepare_late(config: CollectorConfig) -> None:
    """A recording begins that the program has started itself, at a step: process groups are there already.

    Too late for the flight recorder of a torch that leaves it off, and for the timeout that the groups were given.
    """
    stacks.notice_users_timers()
    watching = watch.make(config)
    watching.begin()
    distributed: Any = sys.modules["torch"].distributed
    if distributed.is_available() and distributed.is_initialized():
        watching.groups_made()


def _switch_recorder_on(version: str) -> None:
    """In a torch that leaves it off, unless the user has said what is wanted."""
    if any(name in os.environ for name in BUFFER_VARIABLES):
        return
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < ALWAYS_RECORDS:
        os.environ[BUFFER_VARIABLES[1]] = str(BUFFER_ENTRIES)


def _watched(init: Callable[..., Any], watching: watch.HangWatch) -> Callable[..., Any]:
    """``init_process_group`` that begins the watch: it may be the first thing to hang."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        timeout = rank = None
        try:
            arguments = signature.bind(*args, **kwargs).arguments
            timeout, rank = arguments.get("timeout"), arguments.get("rank")
        except TypeError:
            pass  # what is wrong with the call, the call says
        watching.begin(rank if isinstance(rank, int) and rank >= 0 else None)
        if isinstance(timeout, timedelta):
            watching.end_before(timeout.total_seconds())
        result = init(*args, **kwargs)
        watching.groups_made()
        return result

    return init_process_group
