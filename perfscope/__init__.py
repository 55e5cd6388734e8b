"""PerfScope: a distributed-training profiler and bottleneck analyzer.

Importing the package imports nothing heavy: collectors import it inside a user's training job. The public API loads on
first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfscope._version import __version__

if TYPE_CHECKING:
    from perfscope.analyzers.analyze import analyze
    from perfscope.analyzers.difference.check import check
    from perfscope.analyzers.difference.compare import compare
    from perfscope.analyzers.merging.merge import merge
    from perfscope.analyzers.whatif.ask import whatif
    from perfscope.collectors.session import step
    from perfscope.custom_flops import flops
    from perfscope.summary import Summary
    from perfscope.summary_file import load_summary

__all__ = ["Summary", "__version__", "analyze", "check", "compare", "flops", "load_summary", "merge", "step", "whatif"]

_LAZY = {
    "Summary": "perfscope.summary",
    "analyze": "perfscope.analyzers.analyze",
    "check": "perfscope.analyzers.difference.check",
    "compare": "perfscope.analyzers.difference.compare",
    "flops": "perfscope.custom_flops",
    "load_summary": "perfscope.summary_file",
    "merge": "perfscope.analyzers.merging.merge",
    "step": "perfscope.collectors.session",
    "whatif": "perfscope.analyzers.whatif.ask",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'perfscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
