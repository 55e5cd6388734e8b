"""PerfScope: a distributed-training profiler and bottleneck analyzer.

Importing the package imports nothing heavy: collectors import it inside a user's training job. The public API loads on
first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfscope._version import __version__

if TYPE_CHECKING:
    from perfscope.analyzers.analyze import analyze
    from perfscope.collectors.session import step

__all__ = ["__version__", "analyze", "step"]

_LAZY = {
    "analyze": "perfscope.analyzers.analyze",
    "step": "perfscope.collectors.session",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'perfscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
