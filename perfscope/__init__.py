"""PerfScope: a distributed-training profiler and bottleneck analyzer.

Importing the package imports nothing heavy: collectors import it inside a user's training job. The public API loads on
first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfscope._version import __version__

if TYPE_CHECKING:
    from perfscope.analyzers.analyze import analyze
    from perfscope.analyzers.compare.check import check
    from perfscope.analyzers.compare.compare import compare
    from perfscope.analyzers.export.export import export_chakra
    from perfscope.analyzers.merge.merge import merge
    from perfscope.analyzers.whatif.whatif import whatif
    from perfscope.collectors.capture.session import step
    from perfscope.collectors.inprocess.program import record, start, stop
    from perfscope.results.file import load_summary
    from perfscope.results.summary import Summary
    from perfscope.trace.custom_flops import flops

__all__ = [
    "Summary",
    "__version__",
    "analyze",
    "check",
    "compare",
    "export_chakra",
    "flops",
    "load_summary",
    "merge",
    "record",
    "start",
    "step",
    "stop",
    "whatif",
]

_LAZY = {
    "Summary": "perfscope.results.summary",
    "analyze": "perfscope.analyzers.analyze",
    "check": "perfscope.analyzers.compare.check",
    "compare": "perfscope.analyzers.compare.compare",
    "export_chakra": "perfscope.analyzers.export.export",
    "flops": "perfscope.trace.custom_flops",
    "load_summary": "perfscope.results.file",
    "merge": "perfscope.analyzers.merge.merge",
    "record": "perfscope.collectors.inprocess.program",
    "start": "perfscope.collectors.inprocess.program",
    "step": "perfscope.collectors.capture.session",
    "stop": "perfscope.collectors.inprocess.program",
    "whatif": "perfscope.analyzers.whatif.whatif",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'perfscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
