"""CUPTI at the end of captures.

Kineto leaves CUPTI attached to the process when a profiler stops, and every call that launches work stays slower, in
steps that nobody profiles. With ``TEARDOWN_CUPTI=1`` in the environment it detaches CUPTI in the first CUDA call after
the stop, and attaches it again as the next profiler starts (Kineto's CuptiActivityApi.cpp). A profiler that starts
before that call loses its device events, or hangs (kineto#1554): on an H200 a capture that followed another one
directly had no kernels. So CUPTI is detached after the last capture, and never between two.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

VARIABLE: Final = "TEARDOWN_CUPTI"
"""Kineto's own; it is read at every stop and start of a profiler."""
DETACH: Final = "1"
KEEP: Final = "0"
_SAFE: Final = (12, 6)
"""CUDA version from which CUPTI can be attached again in a process with CUDA graphs (pytorch#146604)."""


@contextmanager
def stopping(*, last: bool) -> Iterator[None]:
    """Around the stop of a profiler. ``last``: no other capture is planned.

    Then CUPTI is detached, from CUDA 12.6 on, unless the variable is set; it stays set, for Kineto to attach CUPTI
    again. Else CUPTI is kept, whatever the variable says, which is put back.
    """
    if not importlib.import_module("torch").cuda.is_initialized():
        yield
        return
    chosen = os.environ.get(VARIABLE)
    if last:
        if chosen is None and _is_safe():
            os.environ[VARIABLE] = DETACH
        yield
        return
    os.environ[VARIABLE] = KEEP
    try:
        yield
    finally:
        if chosen is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = chosen


def _is_safe() -> bool:
    torch: Any = importlib.import_module("torch")
    version = (torch.version.cuda or "").split(".")
    return tuple(int(part) for part in version if part.isdecimal()) >= _SAFE
