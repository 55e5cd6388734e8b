"""Readers: a file in, a :class:`perfscope.trace.Trace` out, one module for each format.

``detect`` tells which reader a file is for. ``chrome.read`` reads Chrome traces (torch.profiler, kineto, Horovod's
timeline), ``chrome.peek`` only looks whose they are. Nsight Systems' exports and reports are recognised, not read.

The modules ``chrome_*`` are the parts of the Chrome reader, in the order the bytes take: ``sources`` unpacks,
``chrome_window`` cuts the text into stretches of whole events, ``chrome_events`` decodes them (``chrome_repair`` mends
what is not JSON), ``chrome_times`` makes exact nanoseconds, ``chrome_columns`` arrays, ``chrome_build`` the trace.
"""

from perfscope.analyzers.readers.detection import Kind, detect

__all__ = ["Kind", "detect"]
