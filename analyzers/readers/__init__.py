"""Readers: a file in, a :class:`perfscope.trace.Trace` out, one module for each format.

``detect`` tells which reader a file is for, ``parts`` which ranks it holds, and ``read`` reads one of them.
``chrome.read`` reads Chrome traces (torch.profiler, kineto, Horovod's timeline), ``chrome.peek`` only looks whose they
are; ``nsys.read`` reads Nsight Systems' exports and reports, ``nsys.ranks`` only looks who is in them.

The modules ``chrome_*`` are the parts of the Chrome reader, in the order the bytes take: ``sources`` unpacks,
``chrome_window`` cuts the text into stretches of whole events, ``chrome_events`` decodes them (``chrome_repair`` mends
what is not JSON), ``chrome_times`` makes exact nanoseconds, ``chrome_columns`` arrays, ``chrome_build`` the trace.

The modules ``nsys_*`` are those of the other: ``nsys_export`` turns a report into an export, ``nsys_tables`` reads
tables of any generation, ``nsys_processes`` finds the ranks, ``nsys_names`` gives names their meaning, ``nsys_columns``
collects arrays, ``nsys_build`` the trace.
"""

from pathlib import Path

from perfscope.analyzers.readers import chrome, nsys
from perfscope.analyzers.readers.detection import Kind, detect
from perfscope.trace import Trace

__all__ = ["Kind", "detect", "parts", "read"]


def parts(path: Path) -> tuple[str | None, ...]:
    """What to ask ``read`` for, one entry a rank: (None,) for a file that is one rank.

    Raises TraceError where the file is Nsight Systems' and cannot be opened.
    """
    if not detect(path).startswith("nsys"):
        return (None,)
    return tuple(rank.part for rank in nsys.ranks(path))


def read(path: Path, part: str | None = None) -> Trace:
    """Read one rank of a file of any kind. Raises TraceError, naming the file, where it cannot be read."""
    return nsys.read(path, part) if detect(path).startswith("nsys") else chrome.read(path)
