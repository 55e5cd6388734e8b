"""Waits of a host for its device that no call in the trace shows.

Some traces hold launches and kernels, but not the calls that synchronize the two. The host then seems to pause for no
reason until its device has done all its work, and goes on right then. One such pause may be chance; where nearly all
long ones end so, the host waited. They become calls, so that whatever is asked of the trace sees them::

    host    launch launch                              launch launch
    device    [ kernel    ][ kernel            ]         [ kernel ...
                          ^ pause              ^ the host goes on
"""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.analyzers.rank.implied.inserted_calls import InsertedCalls, with_calls
from perfscope.analyzers.rank.launches import DeviceWork, done_ns
from perfscope.trace.trace import NONE, Category, Trace

NAME: Final = "cudaDeviceSynchronize (not recorded)"

_PAUSE_NS: Final = 200_000
"""A host that calls nothing for this long, while its device works, pauses or waits."""
_AT_ONCE_NS: Final = 100_000
"""A host that waited for its device goes on within this time."""
_LONG: Final = 0.5
"""Share of the longest of these from which one counts: a host that launches slowly pauses between all launches."""
_MANY: Final = 3
_NEARLY_ALL: Final = 0.8
"""So many pauses, and this share of all, must end with the device's work."""


def with_implied_waits(trace: Trace, work: DeviceWork) -> Trace:
    """The trace with such waits as calls of their own; itself where it has none."""
    calls = trace.rows(Category.RUNTIME)
    if not (len(calls) and (work.launch != NONE).any()) or len(trace.rows(Category.PYTHON)):
        return trace  # functions show what the host did
    marks = trace.rows(Category.CPU_OP, Category.ANNOTATION, Category.RUNTIME)
    last_ns = int(trace.ends_ns(marks).max())
    begin = np.maximum.accumulate(trace.ends_ns(calls))
    until = np.append(trace.start_ns[calls][1:], last_ns)
    known = np.flatnonzero(work.launch != NONE)
    known = known[np.argsort(trace.start_ns[work.launch[known]], kind="stable")]
    done = done_ns(trace.start_ns[work.launch[known]], work.end_ns[known], until)
    length = np.where(done > begin + _AT_ONCE_NS, until - begin, 0)  # the device works on
    paused = np.flatnonzero(length >= max(_PAUSE_NS, _LONG * int(length.max())))
    begin, done = begin[paused], done[paused]
    # The recording may end with the last step.
    events = np.append(trace.start_ns[marks], last_ns)
    goes_on = events[np.minimum(np.searchsorted(events, begin, side="right"), len(events) - 1)]
    waited = (goes_on >= done) & (goes_on <= done + _AT_ONCE_NS)
    if waited.sum() < _MANY or waited.mean() < _NEARLY_ALL:
        return trace
    count = int(waited.sum())
    return with_calls(
        trace,
        InsertedCalls(
            start_ns=begin[waited],
            end_ns=done[waited],
            thread=trace.thread[calls[paused[waited]]],
            name=np.zeros(count, dtype=np.int32),
            names=(NAME,),
            correlation=np.full(count, NONE),
        ),
    )
